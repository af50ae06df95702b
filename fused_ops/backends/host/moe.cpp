// The native part of the operators of Mixture of Experts on a host: rows on their way to the experts, and their sums at home.
#include "embedding_rows.h"
#include "host_link.h"

using namespace fused_ops;

namespace {

// The sum of factor times row over the rows `order[0..count)`, in that order, rounded once.
template <class T>
void add_rows(const T* rows, const float* factors, const int64_t* order, int64_t count, int64_t columns, T* out) {
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    Float16x sum = {};
    for (int64_t i = 0; i < count; ++i) sum += factors[order[i]] * load(rows + order[i] * columns + c);
    store(sum, out + c);
  }
  for (; c < columns; ++c) {
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += factors[order[i]] * to_float(rows[order[i] * columns + c]);
    from_float(sum, out + c);
  }
}

}  // namespace

extern "C" {

// Rows of `input` (`stride` bytes apart), routed row i being row tokens[i], sorted by expert; expert e, one of rank
// e / local_experts, gets counts[e] of them, which go to the rows from places[e] on of the totals[r] rows that rank r's experts
// get. `own`: where those of this rank's experts begin.
void fo_moe_send_rows(void* handle, int64_t call, uint32_t tag, const char* input, int64_t row_bytes, int64_t stride,
                      const int64_t* tokens, int64_t local_experts, const int64_t* counts, const int64_t* places,
                      const int64_t* totals, char* own, Result* result) {
  auto* ch = static_cast<Channel*>(handle);
  std::vector<int64_t> first(ch->world * local_experts + 1, 0);
  for (size_t e = 0; e + 1 < first.size(); ++e) first[e + 1] = first[e] + counts[e];
  for (int r : ch->remote_first()) {
    char* destination = own;
    if (r != ch->rank && ch->wait_credit(r, call, tag, totals[r] * row_bytes, result, &destination) != kOk) return;
    if (row_bytes)
      for (int64_t e = r * local_experts; e < (r + 1) * local_experts; ++e) {
        char* to = destination + places[e] * row_bytes;
        for (int64_t i = first[e]; i < first[e + 1]; ++i, to += row_bytes) memcpy(to, input + tokens[i] * stride, row_bytes);
      }
    if (r != ch->rank) ch->signal(r, call, tag);
  }
}

// out [num_tokens, columns]: of each token the sum of its rows, those r of `rows` [count, columns] with tokens[r] == token, each
// times its factor, in the order of the rows; zero where it has none.
void fo_moe_combine(int32_t dtype, const void* rows, const float* factors, const int64_t* tokens, int64_t count,
                    int64_t num_tokens, int64_t columns, void* out) {
  std::vector<int64_t> first(num_tokens + 1, 0), order(count);
  for (int64_t i = 0; i < count; ++i) ++first[tokens[i] + 1];
  for (int64_t t = 0; t < num_tokens; ++t) first[t + 1] += first[t];
  std::vector<int64_t> next(first.begin(), first.end() - 1);
  for (int64_t i = 0; i < count; ++i) order[next[tokens[i]]++] = i;
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    for (int64_t token = 0; token < num_tokens; ++token)
      add_rows(static_cast<const T*>(rows), factors, order.data() + first[token], first[token + 1] - first[token], columns,
               static_cast<T*>(out) + token * columns);
  });
}

}  // extern "C"
