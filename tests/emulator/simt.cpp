#include "simt.h"

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <random>

// Saves what a callee must keep, puts the stack pointer into *from and goes on where `to` was saved.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

namespace emulator {

Thread* current = nullptr;

namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr int kWarp = 32;

std::vector<char*> free_stacks;
std::deque<Thread*> ready;
std::deque<Grid> held;
std::vector<std::unique_ptr<Block>> blocks;  // of held grids that have begun
std::deque<Grid*> due;                       // whose stream has come to them
bool holding = false;
std::mt19937 shuffle{1};
bool shuffled = false;
void* slow_stream = nullptr;
constexpr unsigned kSlow = 24;

void* scheduler_stack_pointer;
void* scheduler_fake_stack;
const void* scheduler_bottom;
size_t scheduler_size;

char* take_stack() {
  if (free_stacks.empty()) {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) stop("no memory for another thread's stack");
    return static_cast<char*>(memory);
  }
  char* stack = free_stacks.back();
  free_stacks.pop_back();
  return stack;
}

void leave(bool for_good) {
  Thread* thread = current;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &thread->fake_stack, scheduler_bottom, scheduler_size);
  emulator_switch(&thread->stack_pointer, scheduler_stack_pointer);
  __sanitizer_finish_switch_fiber(thread->fake_stack, &scheduler_bottom, &scheduler_size);
}

void release_barrier(Block* block) {
  if (block->at_barrier == 0 || block->at_barrier != block->running) return;
  block->at_barrier = 0;
  for (Thread& thread : block->threads)
    if (thread.at_barrier) {
      thread.at_barrier = false;
      ready.push_back(&thread);
    }
}

void thread_main() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
  current->block->grid->kernel();
  current->ended = true;
  --current->block->running;
  release_barrier(current->block);
  Grid* grid = current->block->grid;
  if (current->block->running == 0 && --grid->blocks_left == 0 && grid->next) due.push_back(grid->next);
  leave(true);
  abort();
}

void start(Thread* thread) {
  thread->stack = take_stack();
  auto* top = reinterpret_cast<void**>(thread->stack + kStackBytes);
  *--top = nullptr;  // thread_main returns to nowhere; and a function is entered with the stack 8 bytes off 16
  *--top = reinterpret_cast<void*>(&thread_main);
  top -= 6;
  thread->stack_pointer = top;
  ready.push_back(thread);
}

void resume(Thread* thread) {
  current = thread;
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, thread->stack, kStackBytes);
  emulator_switch(&scheduler_stack_pointer, thread->stack_pointer);
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
  current = nullptr;
  if (thread->ended) {
    ASAN_UNPOISON_MEMORY_REGION(thread->stack, kStackBytes);
    free_stacks.push_back(thread->stack);
    thread->stack = nullptr;
  }
}

std::unique_ptr<Block> start_block(Grid& grid, unsigned number) {
  auto block = std::make_unique<Block>();
  block->grid = &grid;
  block->index = {number % grid.size.x, number / grid.size.x, 0};
  const int count = static_cast<int>(grid.block_size.x);
  block->threads.resize(count);
  block->running = count;
  for (int n = 0; n < count; ++n) {
    Thread& thread = block->threads[n];
    thread.block = block.get();
    thread.index = {static_cast<unsigned>(n), 0, 0};
    thread.number = n;
    start(&thread);
  }
  return block;
}

void start_due() {
  for (; !due.empty(); due.pop_front()) {
    Grid& grid = *due.front();
    grid.blocks_left = grid.size.x;
    for (unsigned n = 0; n < grid.size.x; ++n) blocks.push_back(start_block(grid, n));
  }
}

void run_all() {
  while (start_due(), !ready.empty()) {
    if (shuffled) std::swap(ready.front(), ready[shuffle() % ready.size()]);
    Thread* thread = ready.front();
    ready.pop_front();
    if (slow_stream && thread->block->grid->stream == slow_stream && shuffle() % kSlow) {
      ready.push_back(thread);
      continue;
    }
    resume(thread);
  }
}

void check_ended(const Block& block) {
  for (const Thread& thread : block.threads) {
    if (thread.ended) continue;
    fprintf(stderr, "block %u thread %d waits for ever at %s (mask %08x)\n", block.index.x, thread.number,
            thread.at_barrier ? "__syncthreads" : thread.exchange.operation, thread.exchange.mask);
    stop("deadlock");
  }
}

}  // namespace

void stop(const char* message) {
  fprintf(stderr, "emulator: %s\n", message);
  if (current) fprintf(stderr, "emulator: in block %u, thread %d\n", current->block->index.x, current->number);
  fflush(stderr);
  __sanitizer_print_stack_trace();
  abort();
}

void launch(Grid grid) {
  if (holding) {
    held.push_back(std::move(grid));
    return;
  }
  grid.blocks_left = grid.size.x;
  for (unsigned n = 0; n < grid.size.x; ++n) {
    const auto block = start_block(grid, n);
    run_all();
    check_ended(*block);
  }
}

void run_held() {
  holding = false;
  std::map<void*, Grid*> last;
  for (Grid& grid : held) {
    Grid*& before = last[grid.stream];
    if (grid.stream && before) before->next = &grid;
    else due.push_back(&grid);
    before = &grid;
  }
  run_all();
  for (const auto& block : blocks) check_ended(*block);
  blocks.clear();
  held.clear();
}

void pause() {
  ready.push_back(current);
  leave(false);
}

void block_barrier() {
  Block* block = current->block;
  current->at_barrier = true;
  ++block->at_barrier;
  release_barrier(block);
  leave(false);
}

uint64_t warp_exchange(const char* operation, unsigned mask, uint64_t value, int source_lane) {
  Block* block = current->block;
  const int first = current->number / kWarp * kWarp, lane = current->number - first;
  if (!(mask >> lane & 1)) stop("a lane is not in its own mask");
  current->exchange = {true, operation, mask, value, source_lane};
  bool all = true;
  for (int l = 0; l < kWarp; ++l) {
    if (!(mask >> l & 1)) continue;
    const int number = first + l;
    if (number >= static_cast<int>(block->threads.size()) || block->threads[number].ended) stop("a lane of the mask has ended");
    const Exchange& other = block->threads[number].exchange;
    all = all && other.waiting && other.mask == mask && other.operation == operation;
  }
  if (!all) {
    leave(false);
    return current->exchange.value;
  }
  uint64_t values[kWarp] = {};
  for (int l = 0; l < kWarp; ++l)
    if (mask >> l & 1) values[l] = block->threads[first + l].exchange.value;
  for (int l = 0; l < kWarp; ++l) {
    if (!(mask >> l & 1)) continue;
    Thread& thread = block->threads[first + l];
    const int source = thread.exchange.source;
    if (!(mask >> source & 1)) stop("a lane reads from a lane that is not in the mask");
    thread.exchange.value = values[source];
    thread.exchange.waiting = false;
    if (&thread != current) ready.push_back(&thread);
  }
  return current->exchange.value;
}

char* shared_memory(const void* variable, size_t bytes) {
  std::vector<char>& memory = current->block->shared[variable];
  if (memory.empty()) memory.assign(bytes, static_cast<char>(0xA5));
  return memory.data();
}

}  // namespace emulator

extern "C" {

// Launches from here on wait for emulator_run, which runs the threads of all of them together (0: they run at once again).
void emulator_hold(int hold) { emulator::holding = hold != 0; }
void emulator_run() { emulator::run_held(); }

// The threads of this stream run at a fraction of the others' speed (null: of none).
void emulator_slow(void* stream) { emulator::slow_stream = stream; }

// Threads that can run do so in an order drawn from this seed; 0: in turn.
void emulator_shuffle(unsigned seed) {
  emulator::shuffled = seed != 0;
  emulator::shuffle.seed(seed);
}
}
