// The native part of the GEMM operators on a host: products of few rows, sums of partial products, and the link's functions
// one by one, for products that torch computes in between.
#include "embedding_rows.h"
#include "host_link.h"

using namespace fused_ops;

namespace {

typedef float Float8x __attribute__((vector_size(32)));
typedef float Float4x __attribute__((vector_size(16)));

template <class Half, class Whole>
Half folded(const Whole& v) {
  Half halves[2];
  memcpy(halves, &v, sizeof v);
  return halves[0] + halves[1];
}

float sum_of_lanes(Float16x v) {
  const Float4x q = folded<Float4x>(folded<Float8x>(v));
  return (q[0] + q[2]) + (q[1] + q[3]);
}

// A block of the product: where it reads and writes, and the distances between rows there.
template <class T>
struct Block {
  const float* input;
  const T* weight;
  float* out;
  int64_t input_stride, weight_stride, out_stride, inner;
  bool add;  // to what `out` holds
};

template <class T, int Rows, int Columns>
void tile(const Block<T>& b, int64_t column) {
  const T* weight = b.weight + column * b.weight_stride;
  Float16x sums[Rows][Columns] = {};
  int64_t k = 0;
  for (; k + kLanes <= b.inner; k += kLanes) {
    Float16x w[Columns];
    for (int j = 0; j < Columns; ++j) w[j] = load(weight + j * b.weight_stride + k);
    for (int i = 0; i < Rows; ++i) {
      const Float16x in = load(b.input + i * b.input_stride + k);
      for (int j = 0; j < Columns; ++j) sums[i][j] += in * w[j];
    }
  }
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Columns; ++j) {
      float sum = sum_of_lanes(sums[i][j]);
      for (int64_t rest = k; rest < b.inner; ++rest)
        sum += b.input[i * b.input_stride + rest] * to_float(weight[j * b.weight_stride + rest]);
      float* out = b.out + i * b.out_stride + column + j;
      *out = b.add ? *out + sum : sum;
    }
}

template <class T, int Rows, int Columns>
void all_columns(const Block<T>& b, int64_t columns) {
  int64_t j = 0;
  for (; j + Columns <= columns; j += Columns) tile<T, Rows, Columns>(b, j);
  for (; j < columns; ++j) tile<T, Rows, 1>(b, j);
}

// Every row of weight is read from memory once, several at a time, since one stream does not fill the memory's pipe.
// The order of an element's summation depends on `inner` alone.
template <class T>
void product(const float* input, const T* weight, int64_t weight_stride, int64_t rows, int64_t columns, int64_t inner, float* out) {
  constexpr int64_t kPanel = 24;    // rows of weight that stay cached while the rows of input pass
  constexpr int64_t kInner = 1024;  // so that 8 rows of input fit the first-level cache
  for (int64_t first = 0; first < columns; first += kPanel) {
    const int64_t count = std::min(kPanel, columns - first);
    for (int64_t k = 0; k == 0 || k < inner; k += kInner)
      for (int64_t i = 0; i < rows; i += 8) {
        const Block<T> b{input + i * inner + k, weight + first * weight_stride + k, out + i * columns + first,
                         inner,                 weight_stride,                      columns,
                         std::min(kInner, inner - k), k > 0};
        switch (std::min<int64_t>(8, rows - i)) {
          case 1: all_columns<T, 1, 8>(b, count); break;
          case 2: all_columns<T, 2, 4>(b, count); break;
          case 3: all_columns<T, 3, 4>(b, count); break;
          case 4: all_columns<T, 4, 4>(b, count); break;
          case 5: all_columns<T, 5, 4>(b, count); break;
          case 6: all_columns<T, 6, 4>(b, count); break;
          case 7: all_columns<T, 7, 3>(b, count); break;
          default: all_columns<T, 8, 3>(b, count); break;
        }
      }
  }
}

// A run of one row's elements: the sources' partial sums in rank order, then bias, rounded once.
template <class T>
void add_run(const float* partials, int64_t apart, int sources, const T* bias, int64_t count, T* out) {
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    Float16x sum = load(partials + c);
    for (int s = 1; s < sources; ++s) sum += load(partials + s * apart + c);
    if (bias) sum += load(bias + c);
    store(sum, out + c);
  }
  for (; c < count; ++c) {
    float sum = partials[c];
    for (int s = 1; s < sources; ++s) sum += partials[s * apart + c];
    if (bias) sum += to_float(bias[c]);
    from_float(sum, out + c);
  }
}

// Channel::wait for ranks that compute alike and so arrive within a fraction of a millisecond: waking from its sleep would take
// as long as what is waited for. Offers the core to others all the while.
Status wait_awake(Channel* ch, const std::vector<int>& sources, int64_t call, uint32_t tag, Result* result) {
  constexpr auto kAwake = std::chrono::microseconds(300);
  const auto arrived = [&] {
    return std::all_of(sources.begin(), sources.end(), [&](int r) {
      return static_cast<uint32_t>(ch->flag(ch->rank, r)->value.load(std::memory_order_acquire) >> 32) == static_cast<uint32_t>(call);
    });
  };
  const auto start = Clock::now();
  while (!arrived() && Clock::now() - start < kAwake) sched_yield();
  result->wait_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
  return ch->wait(sources, call, tag, result);
}

void send_to_all(Channel* ch, int64_t call, uint32_t tag, const char* slice, int64_t bytes, Result* result) {
  for (int r : ch->others()) {
    char* destination;
    if (ch->wait_credit(r, call, tag, bytes, result, &destination) != kOk) return;
    if (bytes) memcpy(destination, slice, bytes);
    ch->signal(r, call, tag);
  }
}

}  // namespace

// Partial sums [sources, rows, columns] and what becomes of them. As `PartialSums` in gemm_native.py.
struct PartialSums {
  const float* partials;
  const void* bias;  // [columns] or null
  int64_t rows, columns;
  int32_t sources, dtype;

  // The sum goes to every one of `destinations`, whose rows are `stride` elements apart.
  void add(const std::vector<char*>& destinations, int64_t stride) const {
    with_dtype(dtype, [&](auto t) {
      using T = decltype(t);
      constexpr int64_t kRun = 2048;  // of elements, which stay in the first-level cache between the destinations
      const int64_t apart = rows * columns;
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t c = 0; c < columns; c += kRun) {
          const int64_t run = std::min(kRun, columns - c);
          T* first = reinterpret_cast<T*>(destinations[0]) + row * stride + c;
          add_run<T>(partials + row * columns + c, apart, sources, bias ? static_cast<const T*>(bias) + c : nullptr, run, first);
          for (size_t d = 1; d < destinations.size(); ++d)
            memcpy(reinterpret_cast<T*>(destinations[d]) + row * stride + c, first, run * sizeof(T));
        }
    });
  }
};

extern "C" {

// out [rows, columns] = input [rows, inner] @ weight [columns, inner]^T, both contiguous along inner.
void fo_gemm_few_rows(int32_t dtype, const float* input, const void* weight, int64_t weight_stride, int64_t rows, int64_t columns,
                      int64_t inner, float* out) {
  with_dtype(dtype, [&](auto t) {
    product(input, static_cast<const decltype(t)*>(weight), weight_stride, rows, columns, inner, out);
  });
}

// Where this rank's slice for `peer` goes, once the peer has posted the credit; null where it is empty or an error came.
char* fo_gemm_wait_credit(void* handle, int32_t peer, int64_t call, uint32_t tag, int64_t bytes, Result* result) {
  char* destination = nullptr;
  static_cast<Channel*>(handle)->wait_credit(peer, call, tag, bytes, result, &destination);
  return destination;
}

void fo_gemm_signal(void* handle, int32_t peer, int64_t call, uint32_t tag) { static_cast<Channel*>(handle)->signal(peer, call, tag); }

// Until every peer's slice is in.
void fo_gemm_wait(void* handle, int64_t call, uint32_t tag, Result* result) {
  auto* ch = static_cast<Channel*>(handle);
  wait_awake(ch, ch->others(), call, tag, result);
}

// Until the slice of one peer is in.
void fo_gemm_wait_for(void* handle, int64_t call, uint32_t tag, int32_t source, Result* result) {
  wait_awake(static_cast<Channel*>(handle), {source}, call, tag, result);
}

// `slice` goes to every peer, and to `own` in this rank's slot; then the peers' are waited for.
void fo_gemm_gather(void* handle, int64_t call, uint32_t tag, const char* slice, int64_t bytes, char* own, Result* result) {
  auto* ch = static_cast<Channel*>(handle);
  send_to_all(ch, call, tag, slice, bytes, result);
  if (result->status != kOk) return;
  if (bytes) memcpy(own, slice, bytes);
  wait_awake(ch, ch->others(), call, tag, result);
}

// One phase: this rank's partial sums of the whole output go to every peer, and each rank adds them up.
void fo_gemm_all_to_all_sum(void* handle, int64_t call, uint32_t tag, const PartialSums* sums, char* out, Result* result) {
  auto* ch = static_cast<Channel*>(handle);
  const int64_t numel = sums->rows * sums->columns;
  send_to_all(ch, call, tag, reinterpret_cast<const char*>(sums->partials + ch->rank * numel), 4 * numel, result);
  if (result->status != kOk || wait_awake(ch, ch->others(), call, tag, result) != kOk) return;
  if (numel) sums->add({out}, sums->columns);
}

// Second phase: the sum of this rank's part goes into every rank's output, whose rows are `stride` elements apart.
// bytes: from the part's first element to the end of an output.
void fo_gemm_gather_sums(void* handle, int64_t call, uint32_t tag, const PartialSums* sums, char* own, int64_t stride, int64_t bytes,
                         Result* result) {
  auto* ch = static_cast<Channel*>(handle);
  std::vector<char*> destinations{own};
  for (int r : ch->others()) {
    char* destination;
    if (ch->wait_credit(r, call, tag, bytes, result, &destination) != kOk) return;
    destinations.push_back(destination);
  }
  if (sums->rows && sums->columns) sums->add(destinations, stride);
  for (int r : ch->others()) ch->signal(r, call, tag);
  wait_awake(ch, ch->others(), call, tag, result);
}

// The sum alone, once every peer's slice is in.
void fo_gemm_wait_and_sum(void* handle, int64_t call, uint32_t tag, const PartialSums* sums, char* out, Result* result) {
  auto* ch = static_cast<Channel*>(handle);
  if (wait_awake(ch, ch->others(), call, tag, result) != kOk) return;
  if (sums->rows && sums->columns) sums->add({out}, sums->columns);
}

}  // extern "C"
