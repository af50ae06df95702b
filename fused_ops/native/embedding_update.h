// Gradients of rows: added up in fp32 in the order of the lookups, then handed once a distinct row to what consumes them,
// an optimizer or a dense gradient.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "embedding_sort.h"

namespace fused_ops {

constexpr int64_t kEntriesATask = 8192;
constexpr int kUpdateAhead = 8;  // entries between asking for a row and updating it

enum Optimizer : int32_t { kPlain = 0, kSgd = 1, kAdagrad = 2, kRowwiseAdagrad = 3, kAdam = 4 };

struct Update {
  Lookups lookups;          // `indices` is not read: `order` has the rows
  const uint64_t* order;    // [nnz], from sort_lookups
  const void* grad;         // [batch, local_dim] of the tables' dtype
  char* const* target;      // [tables] what changes: the table itself, or its dense gradient (plain); null = leave it alone
  float* const* state;      // [tables] Adagrad [rows, dim], row-wise [rows], Adam's mean [rows, dim]; unused otherwise
  float* const* second_state;  // [tables] Adam's mean of squares [rows, dim]
  float* weight_grad;       // [nnz] gradient of per-sample weights, or null
  float learning_rate, eps, beta1, beta2;
  int64_t step;             // Adam: this backward's number, from 1 on
  int32_t optimizer;
};

// One row: w from its dtype to fp32, updated, and back to nearest. `grad` is the row's summed gradient in fp32.
template <class T>
void apply(const Update& u, int64_t t, int64_t row, const float* grad, int64_t dim) {
  T* w = reinterpret_cast<T*>(u.target[t]) + row * dim;
  const float lr = u.learning_rate, eps = u.eps;
  if (u.optimizer == kPlain) {
    for (int64_t d = 0; d < dim; ++d) from_float(grad[d], w + d);
  } else if (u.optimizer == kAdagrad) {
    float* s = u.state[t] + row * dim;
    for (int64_t d = 0; d < dim; ++d) {
      s[d] += grad[d] * grad[d];
      from_float(to_float(w[d]) - lr * grad[d] / (std::sqrt(s[d]) + eps), w + d);
    }
  } else if (u.optimizer == kAdam) {
    float *m = u.state[t] + row * dim, *v = u.second_state[t] + row * dim;
    const float m_part = 1.0f - static_cast<float>(std::pow(u.beta1, u.step)), v_part = 1.0f - static_cast<float>(std::pow(u.beta2, u.step));
    for (int64_t d = 0; d < dim; ++d) {
      m[d] = u.beta1 * m[d] + (1.0f - u.beta1) * grad[d];
      v[d] = u.beta2 * v[d] + (1.0f - u.beta2) * grad[d] * grad[d];
      from_float(to_float(w[d]) - lr * (m[d] / m_part) / (std::sqrt(v[d] / v_part) + eps), w + d);
    }
  } else {
    float step = lr;
    if (u.optimizer == kRowwiseAdagrad) {
      Float16x squares = {};
      float square = 0;
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes) squares += load(grad + d) * load(grad + d);
      for (; d < dim; ++d) square += grad[d] * grad[d];
      for (int v = 0; v < kLanes; ++v) square += squares[v];
      float* s = u.state[t] + row;
      *s += square / static_cast<float>(dim);
      step = lr / (std::sqrt(*s) + eps);
    }
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(load(w + d) - step * load(grad + d), w + d);
    for (; d < dim; ++d) from_float(to_float(w[d]) - step * grad[d], w + d);
  }
}

// What a lookup adds to its row: the gradient of its bag, times its weight, over the bag's length where pooling is mean.
template <class T>
struct Contribution {
  const T* grad;
  float scale;
  int64_t position;
};

template <class T>
Contribution<T> contribution(const Update& u, uint64_t payload, const std::vector<int64_t>& bag_of, const std::vector<int64_t>& column, int64_t only, int64_t stride) {
  const Lookups& l = u.lookups;
  const int64_t bag = l.weights ? bag_of[payload] : static_cast<int64_t>(payload);
  const int64_t f = only >= 0 ? only : bag / l.batch;
  const float weight = l.weights ? l.weights[payload] : 1.0f;
  return {static_cast<const T*>(u.grad) + (bag - f * l.batch) * stride + column[f], l.mean ? weight * l.scale(bag) : weight,
          static_cast<int64_t>(payload)};
}

template <class T>
float dot(const T* a, const T* b, int64_t dim) {
  Float16x sums = {};
  float sum = 0;
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) sums += load(a + d) * load(b + d);
  for (; d < dim; ++d) sum += to_float(a[d]) * to_float(b[d]);
  for (int v = 0; v < kLanes; ++v) sum += sums[v];
  return sum;
}

// Entries [begin, end) of table t, which hold whole rows. `only`: the one feature that looks the table up, or -1.
template <class T>
void update_entries(const Update& u, int64_t t, int64_t begin, int64_t end, int64_t only, int shift,
                    const std::vector<int64_t>& bag_of, const std::vector<int64_t>& column, int64_t stride) {
  const Lookups& l = u.lookups;
  const int64_t dim = l.table_dim[t];
  const uint64_t mask = (uint64_t{1} << shift) - 1;
  const T* table = reinterpret_cast<const T*>(l.table[t]);
  std::vector<float> sum(dim);
  for (int64_t i = begin; i < end;) {
    const uint64_t row = u.order[i] >> shift;
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (; i < end && u.order[i] >> shift == row; ++i) {
      if (i + kUpdateAhead < end) {
        const uint64_t ahead = u.order[i + kUpdateAhead];
        prefetch(contribution<T>(u, ahead & mask, bag_of, column, only, stride).grad, dim * sizeof(T));
        prefetch<true>(table + (ahead >> shift) * dim, dim * sizeof(T));
        if (u.optimizer == kAdagrad || u.optimizer == kAdam) prefetch<true>(u.state[t] + (ahead >> shift) * dim, dim * sizeof(float));
        if (u.optimizer == kAdam) prefetch<true>(u.second_state[t] + (ahead >> shift) * dim, dim * sizeof(float));
        if (u.optimizer == kRowwiseAdagrad) prefetch<true>(u.state[t] + (ahead >> shift), sizeof(float));
      }
      const Contribution<T> c = contribution<T>(u, u.order[i] & mask, bag_of, column, only, stride);
      if (u.weight_grad)
        u.weight_grad[c.position] = (l.mean ? l.scale(bag_of[c.position]) : 1.0f) * dot(c.grad, table + row * dim, dim);
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes) store(load(sum.data() + d) + c.scale * load(c.grad + d), sum.data() + d);
      for (; d < dim; ++d) sum[d] += c.scale * to_float(c.grad[d]);
    }
    if (u.target[t]) apply<T>(u, t, static_cast<int64_t>(row), sum.data(), dim);
  }
}

struct Task {
  int64_t table, begin, end;
};

inline std::vector<Task> whole_row_tasks(const Update& u, int shift) {
  const std::vector<int64_t> start = entry_starts(u.lookups);
  std::vector<Task> tasks;
  for (int64_t t = 0; t < u.lookups.tables; ++t)
    for (int64_t begin = start[t]; begin < start[t + 1];) {
      int64_t end = std::min(begin + kEntriesATask, start[t + 1]);
      while (end < start[t + 1] && u.order[end] >> shift == u.order[end - 1] >> shift) ++end;
      tasks.push_back({t, begin, end});
      begin = end;
    }
  return tasks;
}

// No two threads share a row, and a row's order is fixed: the result does not depend on the number of threads.
inline void update(const Update& u) {
  const Lookups& l = u.lookups;
  const int shift = payload_bits(l);
  std::vector<int64_t> column(l.features), only(l.tables, -2), bag_of(l.weights ? l.nnz : 0);
  int64_t stride = 0;
  for (int64_t f = 0; f < l.features; ++f) {
    column[f] = stride;
    stride += l.dim(f);
    int64_t& feature = only[l.feature_table[f]];
    feature = feature == -2 ? f : -1;
  }
  if (l.weights)
    for (int64_t bag = 0; bag < l.features * l.batch; ++bag)
      for (int64_t i = l.offsets[bag]; i < l.offsets[bag + 1]; ++i) bag_of[i] = bag;
  const std::vector<Task> tasks = whole_row_tasks(u, shift);
  const auto count = static_cast<int64_t>(tasks.size());
#pragma omp parallel for schedule(dynamic) num_threads(l.threads) if (l.threads > 1 && count > 1)
  for (int64_t k = 0; k < count; ++k)
    with_dtype(l.dtype, [&](auto zero) {
      using T = decltype(zero);
      update_entries<T>(u, tasks[k].table, tasks[k].begin, tasks[k].end, only[tasks[k].table], shift, bag_of, column, stride);
    });
}

}  // namespace fused_ops
