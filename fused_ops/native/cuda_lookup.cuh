// Pooled lookups by warps: the sum of a bag's rows, accumulated in fp32 in the bag's order, stored to any place.
#pragma once

#include "cuda_call.cuh"
#include "cuda_rows.cuh"

namespace fused_ops {

#ifndef FO_ROWS_IN_FLIGHT
#define FO_ROWS_IN_FLIGHT 8
#endif
constexpr int kWindow = FO_ROWS_IN_FLIGHT;  // lookups whose rows a lane has under way
constexpr int kGroup = 4;                   // lookups that it asks for at a time; lanes of a row are no fewer
static_assert(kWindow % kGroup == 0);

// Dynamic shared memory of a kernel that pools: kWindow places a lane.
constexpr int window_bytes(int threads) { return threads * kWindow * static_cast<int>(sizeof(uint4)); }

__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Global memory to shared memory, without a register in between where the hardware can.
template <class Raw>
__device__ __forceinline__ void copy_ahead(Raw* to, const Raw* from) {
  if constexpr (sizeof(Raw) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  } else if constexpr (sizeof(Raw) == 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
  } else {
    *to = __ldcg(from);
  }
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until no more than the newest `kGroups` groups of this thread are under way.
template <int kGroups>
__device__ __forceinline__ void wait_but() { asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory"); }

enum Policy : int32_t { kError = 0, kClamp = 1, kHash = 2 };

// A local feature. Strides and columns in bytes.
struct Feature {
  const char* table;
  int64_t rows, first_row;   // first_row: the table's place among all rows of this rank's tables
  int64_t column, packed;    // in a row of the output [b, total_dim], and of [B, D]
  int32_t dim, table_number;
  int32_t vector, lanes;     // bytes a lane moves at once: 16, or an element's; lanes that share a row, a power of two from kGroup up
};

// The lookups of this rank's features over the global batch, feature-major: bag (f, b) is number f * batch + b.
struct Lookups {
  const Feature* features;
  const void *indices, *offsets;  // [nnz], [num_features * batch + 1], of one type
  const float* weights;           // [nnz], or null
  int64_t nnz, batch;
  int32_t num_features, mean, policy, bags;  // bags: of a tile
};

// The row that an index stands for; -1 where there is none.
__device__ __forceinline__ int64_t valid_row(int64_t index, int64_t rows, int policy) {
  if (static_cast<uint64_t>(index) < static_cast<uint64_t>(rows)) return index;
  if (policy == kError || rows == 0) return -1;
  if (policy == kClamp) return index < 0 ? 0 : rows - 1;
  const int64_t rest = index % rows;
  return rest < 0 ? rest + rows : rest;
}

// Rare, and kept out of the loops that may come to it.
static __device__ __noinline__ void report_value(State* state, int code, int rank, int64_t bag, int64_t batch, int64_t position, int64_t value) {
  fail_value(state, code, rank, bag / batch, position, value);
}

// Bags [first_bag, first_bag + count) of feature f: `out` is the first one's row, at the feature's column. The lanes of a row
// run through the lookups of all their bags in one go, so that short bags have as many rows under way as long ones; each of
// the lanes reads and checks one index and one offset, and hands them to the others.
template <class T, class Raw, class Index>
__device__ __forceinline__ void pool_bags(const Lookups& l, const Feature& f, int64_t first_bag, int count, char* out, int64_t out_stride,
                                       State* state, int rank) {
  constexpr int kCount = Pack<T, Raw>::kCount;
  const int lanes = f.lanes, l0 = lane() & (lanes - 1), groups = 32 / lanes, each = (count + groups - 1) / groups;
  const unsigned mask = lanes == 32 ? kAllLanes : ((1u << lanes) - 1) << (lane() - l0);
  const int first = min(lane() / lanes * each, count), num_bags = min(each, count - first);
  if (num_bags == 0) return;
  const auto* offsets = static_cast<const Index*>(l.offsets) + first_bag + first;
  const int64_t start = offsets[0], stop = offsets[num_bags], rows = f.rows;
  const uint32_t row_bytes = static_cast<uint32_t>(f.dim) * sizeof(T);
  auto report = [&](int code, int64_t position, int64_t value) {
    report_value(state, code, rank, first_bag, l.batch, position, value);
  };
  if (start < 0 || stop < start || stop > l.nnz) {
    if (l0 == 0) report(kBadOffset, first_bag + first + num_bags, stop);
    return;
  }
  const auto* indices = static_cast<const Index*>(l.indices) + start;
  const float* weights = l.weights ? l.weights + start : nullptr;
  const int num_lookups = static_cast<int>(stop - start), vectors = f.dim / kCount, apart = static_cast<int>(blockDim.x);
  if (rows == 0 && num_lookups > 0) {
    if (l0 == 0) report(kBadIndex, start, static_cast<int64_t>(indices[0]));
    return;
  }
  const bool mean = l.mean;
  extern __shared__ uint4 windows[];
  auto place_of = [&](int n) { return reinterpret_cast<Raw*>(windows + n * apart + threadIdx.x); };
  out += first * out_stride;

  for (int c = l0; c - l0 < vectors; c += lanes) {  // with all lanes, which hand each other indices
    const bool active = c < vectors;
    const char* table = f.table + static_cast<int64_t>(c) * sizeof(Raw);
    char* to = out + static_cast<int64_t>(c) * sizeof(Raw);

    uint32_t row_number = 0;
    Index next = l0 < num_lookups ? __ldg(indices + l0) : 0;
    int fetched = 0, place = 0;  // lookups asked for, and where the next group goes
    auto fetch = [&] {
      if (fetched < num_lookups) {
        const int k = fetched & (lanes - 1);
        if (k == 0) {
          const int mine = fetched + l0;
          int64_t index = next;
          if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(rows)) {
            const int64_t valid = valid_row(index, rows, l.policy);
            if (valid < 0) report(kBadIndex, start + mine, index);
            index = max(valid, int64_t{0});
          }
          row_number = static_cast<uint32_t>(index);
          next = mine + lanes < num_lookups ? __ldg(indices + mine + lanes) : 0;
        }
#pragma unroll
        for (int u = 0; u < kGroup; ++u) {
          const uint32_t number = __shfl_sync(mask, row_number, k + u, lanes);
          if (active && fetched + u < num_lookups)
            copy_ahead(place_of(place + u), reinterpret_cast<const Raw*>(table + static_cast<uint64_t>(number) * row_bytes));
        }
        fetched += kGroup;
        place = place + kGroup == kWindow ? 0 : place + kGroup;
      }
      end_group();
    };

    float sum[kCount] = {};
    int bag = 0, begin = 0;
    int ends = l0 < num_bags ? static_cast<int>(offsets[l0 + 1] - start) : 0;
    int end = __shfl_sync(mask, ends, 0, lanes);
    auto finish_bag = [&] {
      if (mean && end - begin > 1) {
        const float scale = 1.0f / static_cast<float>(end - begin);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] *= scale;
      }
      if (active) put(reinterpret_cast<Raw*>(to), Pack<T, Raw>::pack(sum));
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] = 0.0f;
      to += out_stride;
      begin = end;
      if (++bag < num_bags) {
        const int k = bag & (lanes - 1);
        if (k == 0) ends = bag + l0 < num_bags ? static_cast<int>(offsets[bag + l0 + 1] - start) : 0;
        end = __shfl_sync(mask, ends, k, lanes);
        if (end < begin && l0 == 0) report(kBadOffset, first_bag + first + bag + 1, start + end);
      }
    };

#pragma unroll 1
    for (int g = 0; g < kWindow / kGroup; ++g) fetch();
    for (int base = 0, from = 0; base < num_lookups; base += kGroup) {
      wait_but<kWindow / kGroup - 1>();
#pragma unroll 1  // a small loop: there are warps enough to wait for one another
      for (int k = base; k < min(base + kGroup, num_lookups); ++k) {
        const Raw row = *place_of(from + k - base);
        while (bag < num_bags && end <= k) finish_bag();
        float value[kCount];
        Pack<T, Raw>::unpack(row, value);
        const float scale = weights ? __ldg(weights + k) : 1.0f;
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] = fmaf(scale, value[i], sum[i]);
      }
      from = from + kGroup == kWindow ? 0 : from + kGroup;
      fetch();
    }
    while (bag < num_bags) finish_bag();
  }
}

// Apart from the kernel that calls it, whose registers are the other's.
template <class T, class Index>
__device__ __noinline__ void pool_elements(const Lookups& l, const Feature& f, int64_t first_bag, int count, char* out, int64_t out_stride,
                                           State* state, int rank) {
  pool_bags<T, T, Index>(l, f, first_bag, count, out, out_stride, state, rank);
}

// Tiles of a run of samples: feature after feature, `bags` samples each; at least one, since every slice has a flag.
__host__ __device__ inline int64_t chunks_of(int64_t samples, int bags) { return (samples + bags - 1) / bags; }
__host__ __device__ inline uint32_t lookup_tiles(const Lookups& l, int64_t samples) {
  const int64_t tiles = chunks_of(samples, l.bags) * l.num_features;
  return tiles > 0 ? static_cast<uint32_t>(tiles) : 1u;
}

// `n` tiles from `tile` on, of samples [first, first + samples) of the global batch. `to`: row of the first sample; packed: rows
// are of [B, D]. Tiles that follow one another are one run of bags, up to the feature's end.
template <class T, class Index>
__device__ __forceinline__ void lookup_run(const Lookups& l, int64_t first, int64_t samples, uint32_t tile, uint32_t n, char* to,
                                           int64_t stride, bool packed, State* state, int rank) {
  const auto chunks = static_cast<uint32_t>(chunks_of(samples, l.bags));
  if (chunks == 0 || l.num_features == 0) return;
  for (const uint32_t end = tile + n; tile < end;) {
    const uint32_t f = tile / chunks, chunk = tile - f * chunks, run = min(end - tile, chunks - chunk);
    const Feature& feature = l.features[f];
    const int64_t at = static_cast<int64_t>(chunk) * l.bags, bag = f * l.batch + first + at;
    const int count = static_cast<int>(min(static_cast<int64_t>(run) * l.bags, samples - at));
    char* out = to + at * stride + (packed ? feature.packed : feature.column);
    if (feature.vector == 16) pool_bags<T, uint4, Index>(l, feature, bag, count, out, stride, state, rank);
    else pool_elements<T, Index>(l, feature, bag, count, out, stride, state, rank);
    tile += run;
  }
}

// The offsets' ends, once a call.
template <class Index>
__device__ __forceinline__ void check_offset_ends(const Lookups& l, State* state, int rank) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const auto* offsets = static_cast<const Index*>(l.offsets);
  const int64_t bags = l.num_features * l.batch, first = offsets[0], end = offsets[bags];
  if (first != 0) fail_value(state, kBadOffset, rank, 0, 0, first);
  else if (end != l.nnz) fail_value(state, kBadOffset, rank, 0, bags, end);
}

}  // namespace fused_ops
