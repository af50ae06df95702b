// The device language and the runtime calls of the CUDA sources, for g++ and the threads of simt.h.
#pragma once

#include <crt/host_defines.h>
#include <driver_types.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt.h"

#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->block->index)
#define blockDim (emulator::current->block->grid->block_size)
#define gridDim (emulator::current->block->grid->size)

namespace emulator {

template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 size, dim3 block_size, size_t dynamic_shared_bytes, void* stream, const Arguments&... arguments) {
  launch({size, block_size, dynamic_shared_bytes, stream, [=] { kernel(static_cast<Parameters>(arguments)...); }});
}

// A variable of the block: the same for every thread that comes by.
template <class T>
T& shared_variable(const char* name) { return *reinterpret_cast<T*>(shared_memory(name, sizeof(T))); }

template <class T>
T* dynamic_shared() {
  static const char variable = 0;
  return reinterpret_cast<T*>(shared_memory(&variable, current->block->grid->dynamic_shared_bytes));
}

template <class T>
T exchange(const char* operation, unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = warp_exchange(operation, mask, bits, source);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

inline int lane() { return current->number % 32; }

inline uint64_t load(const uint64_t* p) {
  pause();  // others may be about to store what this thread polls for
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void store(uint64_t* p, uint64_t v) {
  pause();  // a store may be late
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
template <class T>
T add(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
inline uint64_t clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void load_16(const void* p, uint64_t* low, uint64_t* high) {
  pause();
  uint64_t words[2];
  if (reinterpret_cast<uint64_t>(p) % 16) stop("a misaligned 16-byte load");
  memcpy(words, p, 16);
  *low = words[0], *high = words[1];
}
inline void store_16(void* p, uint64_t low, uint64_t high) {
  pause();
  const uint64_t words[2] = {low, high};
  if (reinterpret_cast<uint64_t>(p) % 16) stop("a misaligned 16-byte store");
  memcpy(p, words, 16);
}
template <size_t kWords>
void load_vector(uint32_t (&to)[kWords], const char* from, bool valid) {
  if (valid && reinterpret_cast<uint64_t>(from) % sizeof to) stop("a misaligned vector load");
  if (valid) memcpy(to, from, sizeof to);
}

// Done when they are waited for, and not before.
inline void copy_4_later(void* to, const void* from, int bytes) {
  if ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) % 4) stop("a misaligned copy");
  current->copies.push_back({to, from, bytes});
}
inline void do_copies() {
  for (const Copy& copy : current->copies) {
    memset(copy.to, 0, 4);
    memcpy(copy.to, copy.from, copy.bytes);
  }
  current->copies.clear();
}

inline void load_matrices(uint32_t (&to)[4], const char* row) {
  if (reinterpret_cast<uint64_t>(row) % 16) stop("a misaligned row of a matrix");
  for (int i = 0; i < 4; ++i) memcpy(&to[i], exchange("ldmatrix", 0xFFFFFFFFu, row, 8 * i + lane() / 4) + lane() % 4 * 4, 4);
}

// mma.sync.m16n8k16: lane 4 g + t has of A rows g and g + 8, columns 2 t and 2 t + 8; of B rows 2 t and 2 t + 8 of column g; of
// C rows g and g + 8, columns 2 t; and in each case the neighbour that follows.
template <class T>
void multiply_tile(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Part {
    uint32_t a[4], b[2];
  };
  static const char variable = 0;
  const int first = current->number / 32 * 32, mine = lane();
  auto* parts = static_cast<Part*>(static_cast<void*>(shared_memory(&variable, 32 * sizeof(Part) * ((current->block->threads.size() + 31) / 32)))) + first;
  parts[mine] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  exchange("mma", 0xFFFFFFFFu, 0, mine);
  auto element = [](uint32_t pair, int odd) {
    const auto bits = static_cast<uint16_t>(pair >> 16 * odd);
    T value;
    memcpy(&value, &bits, 2);
    return static_cast<float>(value);
  };
  const int g = mine / 4, t = mine % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const Part &left = parts[row % 8 * 4 + k % 8 / 2], &right = parts[column * 4 + k % 8 / 2];
      sum += element(left.a[row / 8 + k / 8 * 2], k % 2) * element(right.b[k / 8], k % 2);
    }
    c[i] += sum;
  }
  exchange("mma", 0xFFFFFFFFu, 0, mine);
}

}  // namespace emulator

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emulator::exchange("__shfl_sync", mask, value, emulator::lane() / width * width + (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int source = emulator::lane() ^ bits;
  return emulator::exchange("__shfl_xor_sync", mask, value, source / width > emulator::lane() / width ? emulator::lane() : source);
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { emulator::exchange("__syncwarp", mask, 0, emulator::lane()); }
inline void __syncthreads() { emulator::block_barrier(); }
inline unsigned __ballot_sync(unsigned mask, bool mine) {
  unsigned votes = 0;
  for (int source = 0; source < 32; ++source)
    if (mask >> source & 1) votes |= static_cast<unsigned>(emulator::exchange("__ballot_sync", mask, static_cast<unsigned>(mine), source)) << source;
  return votes;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline void __nanosleep(unsigned) { emulator::pause(); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __int_as_float(int bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return found;
}
inline size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }

template <class T>
T atomicAdd(T* p, T v) { return emulator::add(p, v); }
template <class T>
T atomicSub(T* p, T v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }
template <class T>
T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
template <class T>
T atomicCAS(T* p, T expected, T v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <class T>
T atomicMax(T* p, T v) {
  const T before = *p;
  if (before < v) *p = v;
  return before;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) { return cudaSuccess; }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) { return cudaSuccess; }
