// Pooled lookups by warps: the sum of a bag's rows, accumulated in fp32 in the bag's order, stored to any place.
#pragma once

#include "cuda_call.cuh"
#include "cuda_rows.cuh"

namespace fused_ops {

#ifndef FO_ROWS_IN_FLIGHT
#define FO_ROWS_IN_FLIGHT 8
#endif
constexpr int kRowsInFlight = FO_ROWS_IN_FLIGHT;  // row loads that a lane has under way

enum Policy : int32_t { kError = 0, kClamp = 1, kHash = 2 };

// A local feature. Strides and columns in bytes.
struct Feature {
  const char* table;
  int64_t rows, first_row;   // first_row: the table's place among all rows of this rank's tables
  int64_t column, packed;    // in a row of the output [b, total_dim], and of [B, D]
  int32_t dim, table_number;
  int32_t vector, lanes;     // bytes a lane moves at once: 16, or an element's; lanes that share a row, a power of two
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

// Bags [first_bag, first_bag + count) of feature f: `out` is the first one's row, at the feature's column. The lanes of a row
// run through the lookups of all their bags in one go, so that short bags have as many loads under way as long ones; each of
// the lanes reads and checks one index, and hands it to the others.
// A function of its own: a kernel has several uses of it, and inlined they would share its registers.
template <class T, class Raw, class Index>
__device__ __noinline__ void pool_bags(const Lookups& l, const Feature& f, int64_t first_bag, int count, char* out, int64_t out_stride,
                                       State* state, int rank) {
  constexpr int kCount = Pack<T, Raw>::kCount;
  const int lanes = f.lanes, l0 = lane() % lanes, groups = 32 / lanes, each = (count + groups - 1) / groups;
  const unsigned mask = lanes == 32 ? kAllLanes : ((1u << lanes) - 1) << (lane() - l0);
  const int first = min(lane() / lanes * each, count), num_bags = min(each, count - first);
  if (num_bags == 0) return;
  const auto* offsets = static_cast<const Index*>(l.offsets) + first_bag + first;
  const int64_t start = offsets[0], stop = offsets[num_bags], rows = f.rows;
  const uint32_t row_bytes = static_cast<uint32_t>(f.dim) * sizeof(T);
  auto report = [&](int code, int64_t position, int64_t value) {
    fail_value(state, code, rank, first_bag / l.batch, position, value);
  };
  if (start < 0 || stop < start || stop > l.nnz) {
    if (l0 == 0) report(kBadOffset, first_bag + first + num_bags, stop);
    return;
  }
  const auto* indices = static_cast<const Index*>(l.indices) + start;
  const float* weights = l.weights ? l.weights + start : nullptr;
  const int num_lookups = static_cast<int>(stop - start), vectors = f.dim / kCount;
  if (rows == 0 && num_lookups > 0) {
    if (l0 == 0) report(kBadIndex, start, static_cast<int64_t>(indices[0]));
    return;
  }
  const bool mean = l.mean;
  out += first * out_stride;

  for (int c = l0; c - l0 < vectors; c += lanes) {  // with all lanes, which hand each other indices
    const bool active = c < vectors;
    const char* table = f.table + static_cast<int64_t>(active ? c : 0) * sizeof(Raw);
    char* to = out + static_cast<int64_t>(c) * sizeof(Raw);
    float sum[kCount] = {};
    int bag = 0, begin = 0, end = static_cast<int>(offsets[1] - start);
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
        end = static_cast<int>(offsets[bag + 1] - start);
        if (end < begin && l0 == 0) report(kBadOffset, first_bag + first + bag + 1, start + end);
      }
    };
    Index next = l0 < num_lookups ? __ldg(indices + l0) : 0;
    for (int base = 0; base < num_lookups; base += lanes) {
      const int mine = base + l0, size = min(lanes, num_lookups - base);
      int64_t index = next;
      if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(rows)) {
        const int64_t valid = valid_row(index, rows, l.policy);
        if (valid < 0) report(kBadIndex, start + mine, index);
        index = max(valid, int64_t{0});
      }
      const uint32_t row_number = static_cast<uint32_t>(index);
      const float factor = weights && mine < num_lookups ? __ldg(weights + mine) : 1.0f;
      next = mine + lanes < num_lookups ? __ldg(indices + mine + lanes) : 0;
      for (int k = 0; k < size; k += kRowsInFlight) {
        Raw row[kRowsInFlight];
#pragma unroll
        for (int u = 0; u < kRowsInFlight; ++u) {  // past the end the last row again, rather than a branch
          const uint32_t number = __shfl_sync(mask, row_number, min(k + u, size - 1), lanes);
          row[u] = __ldcg(reinterpret_cast<const Raw*>(table + static_cast<uint64_t>(number) * row_bytes));
        }
#pragma unroll
        for (int u = 0; u < kRowsInFlight; ++u) {
          if (k + u >= size) break;
          while (bag < num_bags && end <= base + k + u) finish_bag();
          float value[kCount];
          Pack<T, Raw>::unpack(row[u], value);
          const float scale = weights ? __shfl_sync(mask, factor, k + u, lanes) : 1.0f;
#pragma unroll
          for (int i = 0; i < kCount; ++i) sum[i] = fmaf(scale, value[i], sum[i]);
        }
      }
    }
    while (bag < num_bags) finish_bag();
  }
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
    else pool_bags<T, T, Index>(l, feature, bag, count, out, stride, state, rank);
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
