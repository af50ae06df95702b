// Pooled lookups: the sum of a bag's rows, accumulated in fp32 in the bag's order, written to any place with any stride.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "embedding_rows.h"

namespace fused_ops {

constexpr int kPrefetchAhead = 8;        // lookups between asking for a row and adding it; 4 to 32 measure within a tenth
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
  float scale(int64_t bag) const {
    const int64_t length = offsets[bag + 1] - offsets[bag];
    return mean && length > 1 ? 1.0f / static_cast<float>(length) : 1.0f;
  }
};

// `Width` columns (a multiple of 16) of bags [bag, last): `out` is the first bag's, the next is out_stride elements on.
template <class T, class Index, bool Weighted, int Width>
void pool_block(const Lookups& l, const T* table, int64_t dim, int64_t bag, int64_t last, T* out, int64_t out_stride) {
  constexpr int kVectors = Width / kLanes;
  const auto* indices = static_cast<const Index*>(l.indices);
  const int64_t end_of_feature = l.offsets[(bag / l.batch + 1) * l.batch];
  for (; bag < last; ++bag, out += out_stride) {
    Float16x sum[kVectors] = {};
    const int64_t end = l.offsets[bag + 1];
    for (int64_t i = l.offsets[bag]; i < end; ++i) {
      if (i + kPrefetchAhead < end_of_feature)
        prefetch(table + static_cast<int64_t>(indices[i + kPrefetchAhead]) * dim, Width * sizeof(T));
      const T* row = table + static_cast<int64_t>(indices[i]) * dim;
      const float w = Weighted ? l.weights[i] : 1.0f;
      for (int v = 0; v < kVectors; ++v) {
        if (Weighted) sum[v] += w * load(row + v * kLanes);
        else sum[v] += load(row + v * kLanes);
      }
    }
    if (l.mean) {
      const float scale = l.scale(bag);
      for (int v = 0; v < kVectors; ++v) sum[v] *= scale;
    }
    for (int v = 0; v < kVectors; ++v) store(sum[v], out + v * kLanes);
  }
}

// The last, fewer than 16, columns.
template <class T, class Index, bool Weighted>
void pool_tail(const Lookups& l, const T* table, int64_t dim, int width, int64_t bag, int64_t last, T* out, int64_t out_stride) {
  const auto* indices = static_cast<const Index*>(l.indices);
  for (; bag < last; ++bag, out += out_stride) {
    float sum[kLanes] = {};
    for (int64_t i = l.offsets[bag]; i < l.offsets[bag + 1]; ++i) {
      const T* row = table + static_cast<int64_t>(indices[i]) * dim;
      const float w = Weighted ? l.weights[i] : 1.0f;
      for (int c = 0; c < width; ++c) sum[c] += Weighted ? w * to_float(row[c]) : to_float(row[c]);
    }
    const float scale = l.scale(bag);
    for (int c = 0; c < width; ++c) from_float(l.mean ? sum[c] * scale : sum[c], out + c);
  }
}

template <class T, class Index, bool Weighted>
void pool(const Lookups& l, int64_t f, int64_t first, int64_t last, T* out, int64_t out_stride) {
  const int64_t dim = l.dim(f);
  const T* table = reinterpret_cast<const T*>(l.table[l.feature_table[f]]);
  const int64_t bag = f * l.batch + first, end = f * l.batch + last;
  int64_t c = 0;
  for (; c + 256 <= dim; c += 256) pool_block<T, Index, Weighted, 256>(l, table + c, dim, bag, end, out + c, out_stride);
  for (; c + 128 <= dim; c += 128) pool_block<T, Index, Weighted, 128>(l, table + c, dim, bag, end, out + c, out_stride);
  for (; c + 64 <= dim; c += 64) pool_block<T, Index, Weighted, 64>(l, table + c, dim, bag, end, out + c, out_stride);
  for (; c + 32 <= dim; c += 32) pool_block<T, Index, Weighted, 32>(l, table + c, dim, bag, end, out + c, out_stride);
  for (; c + 16 <= dim; c += 16) pool_block<T, Index, Weighted, 16>(l, table + c, dim, bag, end, out + c, out_stride);
  if (c < dim) pool_tail<T, Index, Weighted>(l, table + c, dim, static_cast<int>(dim - c), bag, end, out + c, out_stride);
}

// Samples [first, last) of every feature: feature f goes to column columns[f] of rows `out_stride` elements apart.
template <class T, class Index, bool Weighted>
void pool_samples(const Lookups& l, int64_t first, int64_t last, const int64_t* columns, char* out, int64_t out_stride) {
  if (last <= first) return;
  const int64_t bags = l.threads > 1 ? kBagsATask : last - first;
  const int64_t tasks_a_feature = (last - first + bags - 1) / bags;
  const int64_t tasks = l.features * tasks_a_feature;
#pragma omp parallel for schedule(dynamic) num_threads(l.threads) if (l.threads > 1 && tasks > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t f = task / tasks_a_feature, begin = first + task % tasks_a_feature * bags;
    T* to = reinterpret_cast<T*>(out) + (begin - first) * out_stride + columns[f];
    pool<T, Index, Weighted>(l, f, begin, std::min(begin + bags, last), to, out_stride);
  }
}

inline void lookup(const Lookups& l, int64_t first, int64_t last, const int64_t* columns, char* out, int64_t out_stride) {
  with_dtype(l.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (l.index_bytes == 4) {
      if (l.weights) pool_samples<T, int32_t, true>(l, first, last, columns, out, out_stride);
      else pool_samples<T, int32_t, false>(l, first, last, columns, out, out_stride);
    } else {
      if (l.weights) pool_samples<T, int64_t, true>(l, first, last, columns, out, out_stride);
      else pool_samples<T, int64_t, false>(l, first, last, columns, out, out_stride);
    }
  });
}

}  // namespace fused_ops
