// What a CUDA channel keeps between calls and what a launch is told: state in device memory, record in pinned memory,
// parameters; and how a kernel takes the running call down.
#pragma once

#include <cuda_runtime.h>

#include "cuda_link.cuh"

namespace fused_ops {

enum Code : int32_t { kOk = 0, kTimeout = 1, kRejected = 3, kBroken = 4, kBadTag = 8, kHalted = 9, kBadIndex = 10, kBadOffset = 11 };
enum Phase : int32_t { kCredit = 2, kData = 3 };
enum Queue : int { kSends = 0, kLocal = 1, kReceives = 2, kQueues = 3 };

// What only the device can see to be wrong with an input.
struct BadValue {
  int64_t feature, position, value;
};

struct State {
  uint32_t epoch;        // of the last finished call
  uint32_t next_tile[kQueues];
  uint32_t blocks_done;
  uint32_t posted_epoch, posted_tag, posted_place;  // the credit posted ahead
  uint32_t opening, opened;  // epoch that a warp has taken upon itself to open; whose credits are posted
  int32_t stop;          // the running call has failed, or the channel is broken
  int32_t failed, failed_phase, failed_peer;        // of the running call
  int32_t broken;        // a timeout happened: no later call can work
  int32_t halted;        // a call failed and the host has not raised it yet: gradients and updates are suppressed
  int64_t timeout_ns;    // here rather than in the record: many warps read it, and each read of host memory takes a microsecond
  uint64_t work_done_ns, wait_ns;
  BadValue bad;
  uint32_t tiles_done[kMaxRanks * kMaxSlices];
  // What one warp of the device has found out for all, by epoch: only it looks at the link, which may be a slow one to look at.
  uint32_t watching[kMaxRanks * kMaxSlices];                            // the epoch in which a warp took that upon itself
  uint64_t destination[kMaxRanks], arrived[kMaxRanks * kMaxSlices];     // {epoch, place}, {epoch, tag}
};

// In pinned host memory. The host clears `serial` when it has read a record; the device writes one only when it is clear.
struct Record {
  uint64_t wait_ns;      // total time that calls waited beyond their own work
  uint32_t serial;
  int32_t code, phase, peer;
  uint32_t epoch, operator_id;
  uint64_t late;         // bit r: rank r's flags had not all arrived
  int64_t call_number;   // the host's count, to find what the peer said of it
  BadValue bad;
};

struct CallParams {
  Link link;
  State* state;
  Record* record;
  char* output;          // final memory, a slot or ordinary memory
  int64_t output_bytes;
  uint32_t tag, place;   // this call's layout, and the slot it posts if none was posted ahead
  uint32_t next_tag, next_place;  // the credit to post ahead when done; kNone: none
  uint32_t operator_id, stress_delay_us;
  int64_t call_number;
  int32_t abort;         // this rank rejected the call: tell the peers and be done
  int32_t heeds_halt;    // refuse to run while `halted`
  int32_t slices;        // parts a destination's data is sent in
  int32_t most_tiles_a_run;   // that a warp claims at a time: neighbours, which lie in as few tables as may be
  int32_t local_first_warps;  // warps a block that do this rank's own tiles before those for remote ranks
  int32_t receive_first_blocks;  // blocks of which one warp delivers what arrives while the others send
};
constexpr uint32_t kNone = 0xFFFFFFFFu;
constexpr uint32_t kRunsAWarp = 2;  // runs that a warp would claim if they stayed as long as the first

// Part `slice` of `count` things, of which the parts are as even as whole things allow.
__host__ __device__ inline int64_t slice_begin(int64_t count, int slice, int slices) { return count * slice / slices; }

// Takes down the running call of a channel, from a kernel of the call or from one that prepares it.
__device__ __forceinline__ bool fail_call(State* s, int code, int phase, int peer) {
  if (code == kOk) return false;  // another warp failed first
  const bool first = atomicCAS(&s->failed, 0, code) == 0;
  if (first) {
    s->failed_phase = phase;
    s->failed_peer = peer;
  }
  if (code == kTimeout) *reinterpret_cast<volatile int32_t*>(&s->broken) = 1;
  *reinterpret_cast<volatile int32_t*>(&s->stop) = 1;
  __threadfence();
  return first;
}

__device__ __forceinline__ void fail_value(State* s, int code, int rank, int64_t feature, int64_t position, int64_t value) {
  if (fail_call(s, code, kData, rank)) s->bad = {feature, position, value};
}

constexpr int kSharedMemoryPercent = 43;  // 100 KB of the 228 that an SM of Hopper has

// Loads a kernel now: a lazy load would wait behind a kernel that spins, perhaps for this one.
template <class Kernel>
int load(Kernel* kernel) {
  cudaFuncAttributes attributes;
  return static_cast<int>(cudaFuncGetAttributes(&attributes, kernel));
}

// Loads a kernel that waits for peers, and sets its SMs to a share of shared memory that most kernels can do with, since one
// that needs more gets in only when an SM is empty; the rest takes the loads under way.
template <class Kernel>
int prepare(Kernel* kernel) {
  const int failed = load(kernel);
  if (failed) return failed;
  return static_cast<int>(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, kSharedMemoryPercent));
}

}  // namespace fused_ops
