// Pooled lookups by warps: the sum of a bag's rows, accumulated in fp32 in the bag's order, stored to any place.
#pragma once

#include "cuda_call.cuh"
#include "cuda_rows.cuh"

namespace fused_ops {

constexpr int64_t kMostLookups = 1 << 30;  // of the bags that a warp pools in one go; more is refused as a bad offset
constexpr int kGroup = 8;  // lookups whose rows a lane asks for at a time; lanes of a row are no fewer

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

static __device__ const uint4 nothing = {};  // what lanes without a row read

// Rare, and kept out of the loops that may come to it.
static __device__ __noinline__ void report_value(State* state, int code, int rank, int64_t bag, int64_t batch, int64_t position, int64_t value) {
  fail_value(state, code, rank, bag / batch, position, value);
}

// Computed here and kept: else the compiler computes it again at every use.
template <class Value>
__device__ __forceinline__ void keep(Value& value) { asm volatile("" : "+l"(value)); }

// The largest of the warp's values.
__device__ __forceinline__ int largest(int value) {
  for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

// Bags [first_bag, first_bag + count) of feature f: `out` is the first one's row, at the feature's column. The lanes of a row
// run through the lookups of all their bags in one go, so that short bags have as many rows under way as long ones; each of
// the lanes reads and checks one index, and hands it to the others. The warp keeps step, whatever number of lookups the bags
// of each row's lanes have.
template <class T, class Raw, class Index>
__device__ __forceinline__ void pool_bags(const Lookups& l, const Feature& f, int64_t first_bag, int count, char* out, int64_t out_stride,
                                          State* state, int rank) {
  constexpr int kCount = Pack<T, Raw>::kCount;
  const int lanes = f.lanes, l0 = lane() & (lanes - 1), groups = 32 / lanes, each = (count + groups - 1) / groups;
  const int first = min(lane() / lanes * each, count), vectors = f.dim / kCount;
  int num_bags = min(each, count - first), num_lookups = 0;
  const auto* offsets = static_cast<const Index*>(l.offsets) + first_bag + first;
  const int64_t rows = f.rows;
  int64_t start = 0;
  auto report = [&](int code, int64_t position, int64_t value) {
    report_value(state, code, rank, first_bag, l.batch, position, value);
  };
  if (num_bags > 0) {
    const int64_t begins = __ldg(offsets), ends = __ldg(offsets + num_bags);
    const bool begins_badly = begins < 0 || begins > l.nnz;
    if (begins_badly || ends < begins || ends > l.nnz || ends - begins > kMostLookups) {
      if (l0 == 0) report(kBadOffset, first_bag + first + (begins_badly ? 0 : num_bags), begins_badly ? begins : ends);
      num_bags = 0;
    } else if (rows == 0 && ends > begins) {
      if (l0 == 0) report(kBadIndex, begins, static_cast<int64_t>(static_cast<const Index*>(l.indices)[begins]));
      num_bags = 0;
    } else {
      start = begins;
      num_lookups = static_cast<int>(ends - begins);
    }
  }
  const auto* indices = static_cast<const Index*>(l.indices) + start;
  const float* weights = l.weights ? l.weights + start : nullptr;
  const int most = largest(num_lookups), weighted = weights ? num_lookups : 0;
  const bool mean = l.mean;
  constexpr int kNever = 0x7FFFFFFF;  // more than any lookup's number
  auto end_of = [&](int bag) {  // -1: out of bounds
    if (bag >= num_bags) return kNever;
    const int64_t end = __ldg(offsets + bag + 1) - start;
    return end >= 0 && end <= num_lookups ? static_cast<int>(end) : -1;
  };
  bool decreasing = false;
  out += first * out_stride;

  for (int c = l0; c - l0 < vectors; c += lanes) {
    const bool active = c < vectors;
    // Past the last lookup, row 0 is read and not used: a load under a condition would be waited for at once.
    const bool reads = active && num_lookups > 0;
    const char* table = reads ? f.table + static_cast<int64_t>(c) * sizeof(Raw) : reinterpret_cast<const char*>(&nothing);
    const uint32_t row_bytes = reads ? static_cast<uint32_t>(f.dim) * sizeof(T) : 0;
    char* to = out + static_cast<int64_t>(c) * sizeof(Raw);
    keep(table);

    uint32_t row_number = 0;
    Index next = l0 < num_lookups ? __ldg(indices + l0) : 0;
    auto ask = [&](int base, Raw (&row)[kGroup]) {
      const int k = base & (lanes - 1);
      if (k == 0) {
        int64_t index = next;
        if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(rows) && base + l0 < num_lookups) {
          const int64_t valid = valid_row(index, rows, l.policy);
          if (valid < 0) report(kBadIndex, start + base + l0, index);
          index = max(valid, int64_t{0});
        }
        row_number = static_cast<uint32_t>(index);
        const int after = base + lanes + l0;
        next = after < num_lookups ? __ldg(indices + after) : 0;
      }
#pragma unroll
      for (int u = 0; u < kGroup; ++u) {
        const uint32_t number = __shfl_sync(kAllLanes, row_number, k + u, lanes);
        row[u] = __ldcg(reinterpret_cast<const Raw*>(table + static_cast<uint64_t>(number) * row_bytes));
      }
    };

    float sum[kCount] = {};
    int bag = 0, begin = 0, end = end_of(0), next_end = end_of(1);
    decreasing |= end < 0;
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
      decreasing |= next_end < end;
      begin = end;
      end = next_end;
      next_end = end_of(++bag + 1);
    };
    auto add = [&](int base, const Raw (&row)[kGroup]) {
#pragma unroll
      for (int u = 0; u < kGroup; ++u) {
        while (end <= base + u) finish_bag();
        // Past the last lookup every bag is done, and what is added here goes nowhere.
        float value[kCount];
        Pack<T, Raw>::unpack(row[u], value);
        const float scale = base + u < weighted ? __ldg(weights + base + u) : 1.0f;
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] = fmaf(scale, value[i], sum[i]);
      }
    };

    // One group at a time: rolling windows of any depth, in registers or through shared memory, were slower (the card reads
    // rows best in bursts).
    for (int base = 0; base < most; base += kGroup) {
      Raw row[kGroup];
      ask(base, row);
      add(base, row);
    }
    while (bag < num_bags) finish_bag();
  }
  if (decreasing && l0 == 0)
    for (int bag = 0; bag < num_bags; ++bag)
      if (end_of(bag) < (bag ? end_of(bag - 1) : 0)) return report(kBadOffset, first_bag + first + bag + 1, __ldg(offsets + bag + 1));
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
