// The CUDA link: memory that a kernel of this rank and kernels of its peers both address, be it peer-mapped device memory or
// pinned host memory. An operator reaches its peers through put_slice / signal / wait and nothing else.
#pragma once

#include <cstdint>

namespace fused_ops {

constexpr int kMaxRanks = 64;
constexpr int kMaxArenas = 64;
constexpr uint32_t kAbortTag = 0xFFFFFFFFu;
constexpr uint32_t kPredicted = 0x80000000u;  // a credit posted ahead, for the layout that is expected next
constexpr int kPlaceShift = 8;                // a place is {arena: 6 bits, offset in 256-byte units: 26 bits}
constexpr int kArenaShift = 26;

// One entry a peer in a rank's control area; that peer alone writes it.
struct PeerEntry {
  uint64_t flag;          // {epoch, tag}: its slice of that epoch is in this rank's memory
  uint64_t credit_place;  // {epoch, place}: where its output slot of that epoch is
  uint64_t credit_tag;    // {epoch, tag}: stored after the place, for which layout the place stands
  uint64_t unused;
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

__device__ __forceinline__ uint64_t word(uint32_t epoch, uint32_t low) { return (static_cast<uint64_t>(epoch) << 32) | low; }

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
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

// Copies `bytes` with the whole block, as wide as the alignment of both ends allows, eight loads in flight a thread.
template <class Vector>
__device__ __forceinline__ void copy_as(char* to, const char* from, int64_t bytes) {
  constexpr int kInFlight = 8;
  auto* out = reinterpret_cast<Vector*>(to);
  auto* in = reinterpret_cast<const Vector*>(from);
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Vector));
  const int64_t step = blockDim.x;
  int64_t i = threadIdx.x;
  for (; i + (kInFlight - 1) * step < count; i += kInFlight * step) {
    Vector v[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) v[k] = __ldcg(in + i + k * step);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) out[i + k * step] = v[k];
  }
  for (; i < count; i += step) out[i] = __ldcg(in + i);
}

__device__ __forceinline__ void put_slice(char* to, const char* from, int64_t bytes) {
  const uint64_t alignment = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
  if (alignment % 16 == 0) copy_as<uint4>(to, from, bytes);
  else if (alignment % 8 == 0) copy_as<uint2>(to, from, bytes);
  else if (alignment % 4 == 0) copy_as<unsigned int>(to, from, bytes);
  else if (alignment % 2 == 0) copy_as<unsigned short>(to, from, bytes);
  else copy_as<unsigned char>(to, from, bytes);
}

// One thread, after the block's stores and a __syncthreads(): what was stored is visible before the flag.
__device__ __forceinline__ void signal(uint64_t* flag, uint32_t epoch, uint32_t low) {
  __threadfence_system();
  store_release(flag, word(epoch, low));
}

// One thread: polls until the flag carries this epoch. False when `give_up()` says so. Exactly this epoch counts: a flag
// of another call never satisfies the wait.
template <class GiveUp>
__device__ __forceinline__ bool wait(const uint64_t* flag, uint32_t epoch, uint32_t* low, GiveUp&& give_up) {
  for (int polls = 0;; ++polls) {
    const uint64_t v = load_acquire(flag);
    if (static_cast<uint32_t>(v >> 32) == epoch) {
      *low = static_cast<uint32_t>(v);
      return true;
    }
    if (polls > 16) __nanosleep(64);
    if (polls % 16 == 15 && give_up()) return false;
  }
}

}  // namespace fused_ops
