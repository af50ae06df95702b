// The lookups of each table in order of their row, so that a row's gradients are added up and applied once.
//
// An entry is one 64-bit word: the row in the high bits; below `shift` the position of the lookup where it has a weight of its
// own, else the number of its bag. The sort is stable, so entries of one row keep the order of the lookups.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "embedding_lookup.h"

namespace fused_ops {

constexpr int kDigitBits = 11;
constexpr int64_t kSmallSort = 256;  // below, a comparison sort beats clearing a histogram

inline int bits_of(uint64_t x) { return x == 0 ? 0 : 64 - __builtin_clzll(x); }

// Bits below the row in an entry of these lookups.
inline int payload_bits(const Lookups& l) { return std::max(1, bits_of(l.weights ? l.nnz : l.features * l.batch)); }

// Where each table's entries start; entries are grouped by table.
inline std::vector<int64_t> entry_starts(const Lookups& l) {
  std::vector<int64_t> start(l.tables + 1, 0);
  for (int64_t f = 0; f < l.features; ++f) start[l.feature_table[f] + 1] += l.offsets[(f + 1) * l.batch] - l.offsets[f * l.batch];
  for (int64_t t = 0; t < l.tables; ++t) start[t + 1] += start[t];
  return start;
}

// Sorts `n` words of `a` by the `bits` bits from `shift` on, stably; `b` is scratch. The result is in `a`.
inline void radix_sort(uint64_t* a, uint64_t* b, int64_t n, int shift, int bits) {
  if (n < kSmallSort) {
    std::stable_sort(a, a + n, [shift](uint64_t x, uint64_t y) { return (x >> shift) < (y >> shift); });
    return;
  }
  const int passes = (bits + kDigitBits - 1) / kDigitBits;
  uint64_t *from = a, *to = b;
  for (int pass = 0, done = 0; pass < passes; ++pass) {
    const int width = (bits - done + passes - pass - 1) / (passes - pass), at = shift + done;
    const uint64_t mask = (uint64_t{1} << width) - 1;
    int64_t next[1 << kDigitBits] = {};
    for (int64_t i = 0; i < n; ++i) ++next[(from[i] >> at) & mask];
    for (int64_t digit = 0, sum = 0; digit <= static_cast<int64_t>(mask); ++digit) {
      const int64_t count = next[digit];
      next[digit] = sum;
      sum += count;
    }
    for (int64_t i = 0; i < n; ++i) to[next[(from[i] >> at) & mask]++] = from[i];
    std::swap(from, to);
    done += width;
  }
  if (from != a) memcpy(a, from, n * sizeof(uint64_t));
}

inline void fill_entries(const Lookups& l, int64_t f, int shift, uint64_t* out) {
  for (int64_t bag = f * l.batch; bag < (f + 1) * l.batch; ++bag)
    for (int64_t i = l.offsets[bag]; i < l.offsets[bag + 1]; ++i)
      *out++ = (static_cast<uint64_t>(l.index(i)) << shift) | static_cast<uint64_t>(l.weights ? i : bag);
}

// order: [nnz] entries. Indices are valid rows.
inline void sort_lookups(const Lookups& l, uint64_t* order) {
  const int shift = payload_bits(l);
  const std::vector<int64_t> start = entry_starts(l);
  std::vector<uint64_t> scratch(l.nnz);
  std::vector<int64_t> fill(start);
  for (int64_t f = 0; f < l.features; ++f) {
    fill_entries(l, f, shift, order + fill[l.feature_table[f]]);
    fill[l.feature_table[f]] += l.offsets[(f + 1) * l.batch] - l.offsets[f * l.batch];
  }
#pragma omp parallel for schedule(dynamic) num_threads(l.threads) if (l.threads > 1 && l.tables > 1)
  for (int64_t t = 0; t < l.tables; ++t)
    radix_sort(order + start[t], scratch.data() + start[t], start[t + 1] - start[t], shift, bits_of(std::max<int64_t>(l.table_rows[t] - 1, 0)));
}

}  // namespace fused_ops
