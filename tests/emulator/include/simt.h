// Threads of a CUDA grid as fibers of one host thread: a fiber runs until it waits for others of its warp or block, or polls.
//
// What hardware leaves undefined is an error here: a lane that is missing from its own mask, or a lane of the mask that has
// ended; a source outside the mask; threads that wait for ever, be it since others wait elsewhere.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#if !defined(__x86_64__)
#error "the emulator switches fibers by x86-64 instructions"
#endif

namespace emulator {

struct Block;

// What a lane brings to an operation of its warp, and takes away.
struct Exchange {
  bool waiting = false;
  const char* operation = nullptr;
  unsigned mask = 0;
  uint64_t value = 0;
  int source = 0;
};

// An asynchronous copy of 4 bytes that has not been waited for; `bytes` of them are read, the others are zero.
struct Copy {
  void* to;
  const void* from;
  int bytes;
};

struct Thread {
  void* stack_pointer = nullptr;  // while it does not run
  char* stack = nullptr;
  void* fake_stack = nullptr;     // the sanitizer's
  Block* block = nullptr;
  uint3 index{};
  int number = 0;                 // in its block
  bool ended = false, at_barrier = false;
  Exchange exchange;
  std::vector<Copy> copies;
};

struct Grid {
  dim3 size, block_size;
  size_t dynamic_shared_bytes = 0;
  void* stream = nullptr;  // grids of one stream run one after the other; those of none beside all others
  std::function<void()> kernel;
  unsigned blocks_left = 0;
  Grid* next = nullptr;    // on its stream
};

struct Block {
  Grid* grid = nullptr;
  uint3 index{};
  std::vector<Thread> threads;
  int running = 0, at_barrier = 0;
  std::map<const void*, std::vector<char>> shared;  // by variable
};

extern Thread* current;

void launch(Grid grid);
void run_held();
void pause();  // lets every other thread that can run do so first
void block_barrier();
// The value that `source` brought (by `lane ^ source` for an exclusive-or, by number for an index).
uint64_t warp_exchange(const char* operation, unsigned mask, uint64_t value, int source_lane);
char* shared_memory(const void* variable, size_t bytes);
[[noreturn]] void stop(const char* message);

}  // namespace emulator
