// Pooled lookups stored straight into the ranks that own the samples, and the gradients' way back to the tables.
#include "embedding_check.h"
#include "embedding_lookup.h"
#include "embedding_sort.h"
#include "embedding_update.h"
#include "host_link.h"

using namespace fused_ops;

namespace {

// The columns of the output that one rank's features need, packed: run i is `width[i]` elements from column `column[i]`.
struct Runs {
  const int64_t* begin;  // [world + 1] runs of each rank
  const int64_t* column;
  const int64_t* width;
  const int64_t* local_dim;  // [world] their sum
};

// Rows of `grad` for rank `r`, each element divided by `divisor` in fp32.
template <class T>
void pack(const T* grad, int64_t rows, int64_t total_dim, const Runs& runs, int r, float divisor, T* out) {
  for (int64_t b = 0; b < rows; ++b, grad += total_dim)
    for (int64_t i = runs.begin[r]; i < runs.begin[r + 1]; ++i) {
      const T* from = grad + runs.column[i];
      const int64_t width = runs.width[i];
      if (divisor == 1.0f) {
        memcpy(out, from, width * sizeof(T));
      } else {
        int64_t d = 0;
        for (; d + kLanes <= width; d += kLanes) store(load(from + d) / divisor, out + d);
        for (; d < width; ++d) from_float(to_float(from[d]) / divisor, out + d);
      }
      out += width;
    }
}

int64_t element_bytes(int32_t dtype) { return dtype == kFloat ? 4 : 2; }

}  // namespace

extern "C" {

void fo_embedding_check(const Lookups* l, int32_t policy, Problem* problem) {
  *problem = check_offsets(*l);
  if (problem->kind == kNone) *problem = check_indices(*l);
  if (problem->kind == kOutOfRange && policy != kError) problem->kind = -kOutOfRange;
}

void fo_embedding_make_valid(const Lookups* l, int32_t policy, int64_t* out) { make_valid(*l, policy, out); }

// Lookups alone, of the whole batch: out [batch, local_dim], features side by side.
void fo_embedding_lookup_local(const Lookups* l, char* out) {
  std::vector<int64_t> columns;
  int64_t at = 0;
  for (int64_t f = 0; f < l->features; at += l->dim(f++)) columns.push_back(at);
  lookup(*l, 0, l->batch, columns.data(), out, at);
}

// samples[r]..samples[r + 1]: rank r's part of the batch. own: this rank's output [its samples, total_dim].
void fo_embedding_all_to_all(void* handle, int64_t call, uint32_t tag, const Lookups* l, const int64_t* columns, const int64_t* samples,
                             int64_t total_dim, char* own, Result* result) {
  auto* ch = static_cast<Channel*>(handle);
  for (int r : ch->remote_first()) {
    char* destination = own;
    if (r != ch->rank) {
      const int64_t bytes = (samples[r + 1] - samples[r]) * total_dim * element_bytes(l->dtype);
      if (ch->wait_credit(r, call, tag, bytes, result, &destination) != kOk) return;
    }
    lookup(*l, samples[r], samples[r + 1], columns, destination, total_dim);
    if (r != ch->rank) ch->signal(r, call, tag);
  }
  ch->wait(ch->others(), call, tag, result);
}

// grad: this rank's samples [rows, total_dim]. own: where its slice goes in its own slot [batch, local_dim]. The lookups are
// sorted into `order` while the peers' gradients are on their way.
void fo_embedding_gradient(void* handle, int64_t call, uint32_t tag, const Lookups* l, const char* grad, int64_t rows, int64_t total_dim,
                           const int64_t* run_begin, const int64_t* run_column, const int64_t* run_width, const int64_t* local_dim,
                           float divisor, char* own, uint64_t* order, Result* result) {
  auto* ch = static_cast<Channel*>(handle);
  const Runs runs{run_begin, run_column, run_width, local_dim};
  for (int r : ch->remote_first()) {
    char* destination = own;
    if (r != ch->rank) {
      const int64_t bytes = rows * local_dim[r] * element_bytes(l->dtype);
      if (ch->wait_credit(r, call, tag, bytes, result, &destination) != kOk) return;
    }
    with_dtype(l->dtype, [&](auto zero) {
      using T = decltype(zero);
      pack(reinterpret_cast<const T*>(grad), rows, total_dim, runs, r, divisor, reinterpret_cast<T*>(destination));
    });
    if (r != ch->rank) ch->signal(r, call, tag);
  }
  sort_lookups(*l, order);
  ch->wait(ch->others(), call, tag, result);
}

// The same packing into ordinary memory, rank after rank: what an exchange that is not fused sends.
void fo_embedding_pack(const Lookups* l, int world, const char* grad, int64_t rows, int64_t total_dim, const int64_t* run_begin,
                       const int64_t* run_column, const int64_t* run_width, const int64_t* local_dim, float divisor, char* out) {
  const Runs runs{run_begin, run_column, run_width, local_dim};
  for (int r = 0; r < world; ++r) {
    with_dtype(l->dtype, [&](auto zero) {
      using T = decltype(zero);
      pack(reinterpret_cast<const T*>(grad), rows, total_dim, runs, r, divisor, reinterpret_cast<T*>(out));
    });
    out += rows * local_dim[r] * element_bytes(l->dtype);
  }
}

void fo_embedding_sort(const Lookups* l, uint64_t* order) { sort_lookups(*l, order); }

int fo_embedding_payload_bits(const Lookups* l) { return payload_bits(*l); }

void fo_embedding_update(const Update* u) { update(*u); }

}  // extern "C"
