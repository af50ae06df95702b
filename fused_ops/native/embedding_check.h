// Offsets and indices are looked at before anything is sent: what is wrong, where, or the indices made valid.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "embedding_lookup.h"

namespace fused_ops {

enum ProblemKind : int32_t { kNone = 0, kFirstOffset = 1, kDecreasing = 2, kLastOffset = 3, kOutOfRange = 4, kNoRows = 5 };
enum Policy : int32_t { kError = 0, kClamp = 1, kHash = 2 };

struct Problem {
  int32_t kind = kNone;
  int64_t feature = 0, at = 0, value = 0;
};

inline Problem check_offsets(const Lookups& l) {
  const int64_t bags = l.features * l.batch;
  if (l.offsets[0] != 0) return {kFirstOffset, 0, 0, l.offsets[0]};
  if (l.offsets[bags] != l.nnz) return {kLastOffset, 0, bags, l.offsets[bags]};
  int64_t decreasing = 0;
  for (int64_t i = 0; i < bags; ++i) decreasing += l.offsets[i + 1] < l.offsets[i];
  if (decreasing)
    for (int64_t i = 0; i < bags; ++i)
      if (l.offsets[i + 1] < l.offsets[i]) return {kDecreasing, i / l.batch, i + 1, l.offsets[i + 1]};
  return {};
}

template <class Index>
Problem check_feature(const Lookups& l, int64_t f) {
  const auto* indices = static_cast<const Index*>(l.indices);
  const int64_t begin = l.offsets[f * l.batch], end = l.offsets[(f + 1) * l.batch], rows = l.rows(f);
  using Unsigned = std::make_unsigned_t<Index>;
  const auto limit = static_cast<Unsigned>(std::min<int64_t>(rows, std::numeric_limits<Index>::max()));
  Unsigned outside = 0;  // a negative index is a huge unsigned one
  if (static_cast<int64_t>(limit) == rows)
    for (int64_t i = begin; i < end; ++i) outside |= static_cast<Unsigned>(static_cast<Unsigned>(indices[i]) >= limit);
  else
    for (int64_t i = begin; i < end; ++i) outside |= static_cast<Unsigned>(indices[i] < 0);
  if (!outside) return {};
  if (rows == 0) return {kNoRows, f, begin, static_cast<int64_t>(indices[begin])};
  for (int64_t i = begin; i < end; ++i)
    if (indices[i] < 0 || static_cast<int64_t>(indices[i]) >= rows) return {kOutOfRange, f, i, static_cast<int64_t>(indices[i])};
  return {};
}

inline Problem check_indices(const Lookups& l) {
  if (l.batch == 0) return {};
  for (int64_t f = 0; f < l.features; ++f) {
    const Problem p = l.index_bytes == 4 ? check_feature<int32_t>(l, f) : check_feature<int64_t>(l, f);
    if (p.kind) return p;
  }
  return {};
}

inline int64_t valid_row(int64_t index, int64_t rows, int32_t policy) {
  if (policy == kClamp) return std::min(std::max<int64_t>(index, 0), rows - 1);
  const int64_t rest = index % rows;
  return rest < 0 ? rest + rows : rest;
}

// Every index as a row of its table, under clamp or hash. Tables that are looked up have rows (check_indices).
inline void make_valid(const Lookups& l, int32_t policy, int64_t* out) {
  for (int64_t f = 0; f < l.features; ++f) {
    const int64_t rows = l.rows(f);
    for (int64_t i = l.offsets[f * l.batch]; i < l.offsets[(f + 1) * l.batch]; ++i)
      out[i] = valid_row(l.index(i), rows, policy);
  }
}

}  // namespace fused_ops
