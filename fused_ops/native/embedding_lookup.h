// Pooled lookups: the sum of a bag's rows, accumulated in fp32 in the bag's order, written to any place with any stride.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "embedding_rows.h"

namespace fused_ops {

// Lookups between asking for a row and adding it. The near request fills the first-level cache, whose few fill buffers bound
// what it can have in flight; the far one goes to the second level, every other line (its neighbour comes along).
constexpr int kPrefetchAhead = 8;
constexpr int kPrefetchFar = 64;
constexpr int64_t kBagsATask = 128;      // unit of work of a thread

// This rank's tables and the lookups into them, feature-major: bag (f, b) is number f * batch + b.
struct Lookups {
  int64_t features, batch, nnz, tables;
  const int64_t* feature_table;  // [features]
  const int64_t* table_rows;     // [tables]
  const int64_t* table_dim;      // [tables]
  char* const* table;            // [tables] first row
  const void* indices;           // [nnz] of index_bytes each
  const int64_t* offsets;        // [features * batch + 1]
  const float* weights;          // [nnz], or null
  int32_t index_bytes, dtype, mean, threads;

  int64_t dim(int64_t f) const { return table_dim[feature_table[f]]; }
  int64_t rows(int64_t f) const { return table_rows[feature_table[f]]; }
  int64_t local_dim() const {
    int64_t sum = 0;
    for (int64_t f = 0; f < features; ++f) sum += dim(f);
    return sum;
  }
  int64_t index(int64_t i) const {
    return index_bytes == 4 ? static_cast<const int32_t*>(indices)[i] : static_cast<const int64_t*>(indices)[i];
  }
  float scale(int64_t bag) const {
    const int64_t length = offsets[bag + 1] - offsets[bag];
    return mean && length > 1 ? 1.0f / static_cast<float>(length) : 1.0f;
  }
};

// `Width` columns (a multiple of 16) of bags [bag, last): `out` is the first bag's, the next is out_stride elements on.
template <class T, int Width>
void pool_block(const Lookups& l, const T* table, int64_t dim, int64_t bag, int64_t last, T* out, int64_t out_stride) {
  constexpr int kVectors = Width / kLanes;
  const int64_t end_of_feature = l.offsets[(bag / l.batch + 1) * l.batch];
  for (; bag < last; ++bag, out += out_stride) {
    Float16x sum[kVectors] = {};
    const int64_t end = l.offsets[bag + 1];
    for (int64_t i = l.offsets[bag]; i < end; ++i) {
      if (i + kPrefetchAhead < end_of_feature)
        prefetch(table + l.index(i + kPrefetchAhead) * dim, Width * sizeof(T));
      if (i + kPrefetchFar < end_of_feature) prefetch_far(table + l.index(i + kPrefetchFar) * dim, Width * sizeof(T));
      const T* row = table + l.index(i) * dim;
      const float w = l.weights ? l.weights[i] : 1.0f;  // times 1 is exact
      for (int v = 0; v < kVectors; ++v) sum[v] += w * load(row + v * kLanes);
    }
    if (l.mean) {
      const float scale = l.scale(bag);
      for (int v = 0; v < kVectors; ++v) sum[v] *= scale;
    }
    for (int v = 0; v < kVectors; ++v) store(sum[v], out + v * kLanes);
  }
}

// The last, fewer than 16, columns.
template <class T>
void pool_tail(const Lookups& l, const T* table, int64_t dim, int width, int64_t bag, int64_t last, T* out, int64_t out_stride) {
  for (; bag < last; ++bag, out += out_stride) {
    float sum[kLanes] = {};
    for (int64_t i = l.offsets[bag]; i < l.offsets[bag + 1]; ++i) {
      const T* row = table + l.index(i) * dim;
      const float w = l.weights ? l.weights[i] : 1.0f;
      for (int c = 0; c < width; ++c) sum[c] += w * to_float(row[c]);
    }
    const float scale = l.scale(bag);
    for (int c = 0; c < width; ++c) from_float(l.mean ? sum[c] * scale : sum[c], out + c);
  }
}

template <class T>
void pool(const Lookups& l, int64_t f, int64_t first, int64_t last, T* out, int64_t out_stride) {
  const int64_t dim = l.dim(f);
  const T* table = reinterpret_cast<const T*>(l.table[l.feature_table[f]]);
  const int64_t bag = f * l.batch + first, end = f * l.batch + last;
  int64_t c = 0;
  for (; c + 256 <= dim; c += 256) pool_block<T, 256>(l, table + c, dim, bag, end, out + c, out_stride);
  for (; c + 128 <= dim; c += 128) pool_block<T, 128>(l, table + c, dim, bag, end, out + c, out_stride);
  for (; c + 64 <= dim; c += 64) pool_block<T, 64>(l, table + c, dim, bag, end, out + c, out_stride);
  for (; c + 32 <= dim; c += 32) pool_block<T, 32>(l, table + c, dim, bag, end, out + c, out_stride);
  for (; c + 16 <= dim; c += 16) pool_block<T, 16>(l, table + c, dim, bag, end, out + c, out_stride);
  if (c < dim) pool_tail<T>(l, table + c, dim, static_cast<int>(dim - c), bag, end, out + c, out_stride);
}

// Samples [first, last) of every feature: feature f goes to column columns[f] of rows `out_stride` elements apart.
template <class T>
void pool_samples(const Lookups& l, int64_t first, int64_t last, const int64_t* columns, char* out, int64_t out_stride) {
  if (last <= first) return;
  const int64_t bags = l.threads > 1 ? kBagsATask : last - first;
  const int64_t tasks_a_feature = (last - first + bags - 1) / bags;
  const int64_t tasks = l.features * tasks_a_feature;
#pragma omp parallel for schedule(dynamic) num_threads(l.threads) if (l.threads > 1 && tasks > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t f = task / tasks_a_feature, begin = first + task % tasks_a_feature * bags;
    T* to = reinterpret_cast<T*>(out) + (begin - first) * out_stride + columns[f];
    pool<T>(l, f, begin, std::min(begin + bags, last), to, out_stride);
  }
}

inline void lookup(const Lookups& l, int64_t first, int64_t last, const int64_t* columns, char* out, int64_t out_stride) {
  with_dtype(l.dtype, [&](auto zero) {
    pool_samples<decltype(zero)>(l, first, last, columns, out, out_stride);
  });
}

}  // namespace fused_ops
