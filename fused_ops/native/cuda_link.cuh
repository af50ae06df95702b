// The CUDA link: memory that a kernel of this rank and kernels of its peers both address, be it peer-mapped device memory or
// pinned host memory. An operator reaches its peers through put / put_slice, signal and wait and nothing else.
//
// The unit of work is a warp: tiles are claimed, stored and waited for by one warp each, so that no warp waits for another.
#pragma once

#include <cstdint>

namespace fused_ops {

constexpr int kMaxRanks = 64;
constexpr int kMaxSlices = 8;                 // flags a pair of ranks has, hence parts that a destination's data can arrive in
constexpr int kMaxArenas = 64;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr uint32_t kAbortTag = 0xFFFFFF00u;   // and above: nothing more comes, on account of the rank in the low bits
constexpr uint32_t kPredicted = 0x80000000u;  // a credit posted ahead, for the layout that is expected next
constexpr int kPlaceShift = 8;                // a place is {arena: 6 bits, offset in 256-byte units: 26 bits}
constexpr int kArenaShift = 26;

// One entry a peer in a rank's control area; that peer alone writes it.
struct PeerEntry {
  uint64_t credit_place;      // {epoch, place}: where its output slot of that epoch is
  uint64_t credit_tag;        // {epoch, tag}: stored after the place, for which layout the place stands
  uint64_t unused[6];
  // {epoch, tag}: that slice of its data of that epoch is in this rank's memory. By the epoch's parity, since a rank that has
  // finished an epoch may call off the next one while a slower peer still looks for the flags of this one; the one after next
  // it can only end once that peer has ended the next.
  uint64_t flags[2][kMaxSlices];

  __device__ uint64_t* flag(uint32_t epoch, int slice) { return &flags[epoch & 1][slice]; }
};

struct Link {
  char* const* control;  // [world]: every rank's control area, an array of PeerEntry by source rank
  char* const* arenas;   // [kMaxArenas][kMaxRanks]: where each rank's slots live
  int rank, world;

  __device__ PeerEntry* inbox(int from) const { return reinterpret_cast<PeerEntry*>(control[rank]) + from; }
  __device__ PeerEntry* outbox(int to) const { return reinterpret_cast<PeerEntry*>(control[to]) + rank; }
  __device__ char* locate(int owner, uint32_t place) const {
    const uint32_t units = place & ((1u << kArenaShift) - 1);
    return arenas[(place >> kArenaShift) * kMaxRanks + owner] + (static_cast<uint64_t>(units) << kPlaceShift);
  }
};

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x & 31); }

__device__ __forceinline__ uint64_t word(uint32_t epoch, uint32_t low) { return (static_cast<uint64_t>(epoch) << 32) | low; }

// Whose input, or patience, was at fault where a tag says that nothing more comes.
__device__ __forceinline__ int culprit_of(uint32_t abort_tag) { return static_cast<int>(abort_tag - kAbortTag); }

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// For polling: an acquire load would empty the SM's first-level cache every time.
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_release(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  return t;
}

// One thread's piece of a slice, from registers.
template <class Vector>
__device__ __forceinline__ void put(Vector* to, const Vector& value) { *to = value; }

// `rows` rows of `width` bytes between strided places, with the whole warp, eight loads in flight a lane; each vector by way
// of `change`.
template <class Vector, class Change>
__device__ __forceinline__ void put_as(char* to, int64_t to_stride, const char* from, int64_t from_stride, int rows, int width,
                                       Change&& change) {
  constexpr int kInFlight = 8;
  const int per_row = width / static_cast<int>(sizeof(Vector)), count = rows * per_row;
  for (int base = lane(); base < count; base += 32 * kInFlight) {
    Vector v[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int i = base + 32 * k, row = i / per_row;
      if (i < count) v[k] = __ldcg(reinterpret_cast<const Vector*>(from + row * from_stride) + (i - row * per_row));
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int i = base + 32 * k, row = i / per_row;
      if (i < count) put(reinterpret_cast<Vector*>(to + row * to_stride) + (i - row * per_row), change(v[k]));
    }
  }
}

// The widest access that both ends, their strides and the width allow: a power of two, or more.
__device__ __forceinline__ int alignment_of(const char* to, int64_t to_stride, const char* from, int64_t from_stride, int rows, int width) {
  const uint64_t bits = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(width) |
                        (rows > 1 ? static_cast<uint64_t>(to_stride) | static_cast<uint64_t>(from_stride) : 0);
  return static_cast<int>(bits & (~bits + 1) & 31) ?: 32;
}

struct Unchanged {
  template <class Vector>
  __device__ __forceinline__ Vector operator()(const Vector& v) const { return v; }
};

// As wide as possible. A part of at most 2^31 - 1 vectors.
static __device__ __noinline__ void put_slice(char* to, int64_t to_stride, const char* from, int64_t from_stride, int rows, int width) {
  const int alignment = alignment_of(to, to_stride, from, from_stride, rows, width);
  if (alignment >= 16) put_as<uint4>(to, to_stride, from, from_stride, rows, width, Unchanged());
  else if (alignment >= 4) put_as<unsigned int>(to, to_stride, from, from_stride, rows, width, Unchanged());
  else put_as<unsigned char>(to, to_stride, from, from_stride, rows, width, Unchanged());
}

__device__ __forceinline__ void put_slice(char* to, const char* from, int bytes) { put_slice(to, 0, from, 0, 1, bytes); }

// Adds to a counter of this device; what this thread has seen stored, before or by the other warps that have added, is stored
// for every device of the system before what it stores next.
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.sys.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

// One thread, after the warp's stores and a __syncwarp(): what was stored is visible before the flag.
__device__ __forceinline__ void signal(uint64_t* flag, uint32_t epoch, uint32_t low) { store_release(flag, word(epoch, low)); }

// One thread: polls until the flag carries this epoch. False when `give_up()` says so. Exactly this epoch counts: a flag
// of another call never satisfies the wait.
template <class GiveUp>
__device__ __forceinline__ bool wait(const uint64_t* flag, uint32_t epoch, uint32_t* low, GiveUp&& give_up) {
  for (int polls = 0;; ++polls) {
    if (static_cast<uint32_t>(load_relaxed(flag) >> 32) == epoch) {
      *low = static_cast<uint32_t>(load_acquire(flag));
      return true;
    }
    if (polls > 16) __nanosleep(64);
    if (polls % 16 == 15 && give_up()) return false;
  }
}

}  // namespace fused_ops
