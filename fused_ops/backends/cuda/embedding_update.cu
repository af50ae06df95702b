// Gradients of rows, added up in fp32 in the order of the sorted lookups and handed once a distinct row to the optimizer.
//
// The sorted words are cut into units of kUnit. A group of lanes runs through a unit and finishes the rows that begin and end
// in it; of a row that reaches over a unit's end it leaves a partial sum, and a second kernel adds the partial sums of each such
// row in their order. Where units and rows lie depends on the lookups alone, so the result is the same in every run.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "cuda_lookup.cuh"
#include "cuda_optimizer.cuh"

namespace fused_ops {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kAnyRowsBlocks = 512;
constexpr int kUnit = 64;          // words a group of lanes runs through
constexpr int kEntriesInFlight = 4;
constexpr int kShortSpan = 16;     // units that one warp adds up alone; longer spans take the whole block
constexpr int kUnitsAWarp = 8;     // whose spans a warp looks after

struct UpdateParams {
  Lookups lookups;
  OptimizerParams optimizer;
  const uint64_t* order;     // [nnz] sorted words
  const int32_t* bag_of;     // [nnz] by position, null where words hold bags
  const Target* targets;     // by table
  const char* grad;          // [B, D]
  int64_t grad_stride;       // bytes
  const int32_t* halted;     // nothing changes while it is not zero
  float *head, *tail;        // [units, width] partial sums: of the row that began before the unit, of the one that goes on after
  int32_t shift, width;      // of a word's payload; floats of a partial sum
  int32_t lanes;             // that share a row
  int32_t index_bytes;       // of offsets
};

// Where a lookup's gradient comes from and where its row is. Words come in order of tables, so it is looked up seldom.
struct Place {
  Feature feature;
  Target target;
  int64_t first_bag = 0;

  __device__ __forceinline__ void move_to(const UpdateParams& p, int64_t bag) {
    if (feature.table != nullptr && bag >= first_bag && bag - first_bag < p.lookups.batch) return;
    const int64_t f = bag / p.lookups.batch;
    feature = p.lookups.features[f];
    target = p.targets[feature.table_number];
    first_bag = f * p.lookups.batch;
  }
};

// One sorted word: the lookup's row in its table, its gradient, and what that is multiplied by.
struct Entry {
  int64_t row;
  const char* grad;
  float factor;

  Entry() = default;
  __device__ __forceinline__ Entry(const UpdateParams& p, Place& place, uint64_t word) {
    // Words of lookups that bad offsets leave out hold anything: what they say is kept within bounds.
    const int64_t bags = p.lookups.num_features * p.lookups.batch;
    int64_t payload = static_cast<int64_t>(word & ((uint64_t{1} << p.shift) - 1));
    if (p.bag_of) payload = min(payload, p.lookups.nnz - 1);
    const int64_t bag = min(max(p.bag_of ? int64_t{p.bag_of[payload]} : payload, int64_t{0}), bags - 1);
    place.move_to(p, bag);
    row = static_cast<int64_t>(word >> p.shift) - place.feature.first_row;
    row = min(max(row, int64_t{0}), max(place.feature.rows - 1, int64_t{0}));
    grad = p.grad + (bag - place.first_bag) * p.grad_stride + place.feature.packed;
    factor = p.bag_of ? p.lookups.weights[payload] : 1.0f;
    if (p.lookups.mean) {
      const float length = p.index_bytes == 4 ? length_of<int32_t>(p, bag) : length_of<int64_t>(p, bag);
      if (length > 1.0f) factor *= 1.0f / length;
    }
  }

 private:
  template <class Index>
  static __device__ __forceinline__ float length_of(const UpdateParams& p, int64_t bag) {
    const auto* offsets = static_cast<const Index*>(p.lookups.offsets);
    return static_cast<float>(offsets[bag + 1] - offsets[bag]);
  }
};

__device__ __forceinline__ uint64_t row_at(const UpdateParams& p, int64_t i) { return p.order[i] >> p.shift; }

// The sum over the lanes that share a row.
__device__ __forceinline__ float sum_over(float mine, int lanes, unsigned mask) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) mine += __shfl_xor_sync(mask, mine, offset);
  return mine;
}

template <int kOptimizer>
__device__ __forceinline__ bool suppressed(const UpdateParams& p) {
  return kOptimizer != kPlain && *p.halted != 0;  // a plain gradient shows the poison instead
}

// What the lanes that share a row need of one word. Each lane finds it out for a word of its own and hands it to the others.
template <int kOptimizer>
struct Work {
  const char* grad;
  RowPlace row;
  float factor;
  int32_t dim;
  bool changes, ends;  // there is something to change; the word is its row's last

  __device__ __forceinline__ Work from(unsigned mask, int source, int lanes) const {
    Work w;
    w.grad = hand(mask, grad, source, lanes);
    w.row.weights = hand(mask, row.weights, source, lanes);
    if constexpr (kOptimizer >= kAdagrad) w.row.state = hand(mask, row.state, source, lanes);
    if constexpr (kOptimizer == kAdam) w.row.second_state = hand(mask, row.second_state, source, lanes);
    w.factor = __shfl_sync(mask, factor, source, lanes);
    const int packed = __shfl_sync(mask, dim << 2 | changes << 1 | static_cast<int>(ends), source, lanes);
    w.dim = packed >> 2;
    w.changes = packed >> 1 & 1;
    w.ends = packed & 1;
    return w;
  }

 private:
  template <class P>
  static __device__ __forceinline__ P* hand(unsigned mask, P* pointer, int source, int lanes) {
    return reinterpret_cast<P*>(__shfl_sync(mask, reinterpret_cast<unsigned long long>(pointer), source, lanes));
  }
};

// kVectors: of 16 bytes, that each lane has of a row.
template <int kOptimizer, class T, int kVectors>
__global__ void __launch_bounds__(kThreads, 2) units_kernel(const __grid_constant__ UpdateParams p) {
  constexpr int kCount = Pack<T, uint4>::kCount, kDepth = kEntriesInFlight / kVectors;
  if (suppressed<kOptimizer>(p)) return;
  const Applied<kOptimizer> optimizer(p.optimizer);
  const int lanes = p.lanes, l0 = lane() % lanes, first_column = l0 * kCount, column_step = lanes * kCount;
  const unsigned mask = lanes == 32 ? kAllLanes : ((1u << lanes) - 1) << (lane() - l0);
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / lanes, nnz = p.lookups.nnz;
  const int64_t first = unit * kUnit, end = min(first + kUnit, nnz);
  if (first >= nnz) return;

  Place place{};
  bool began_before = first > 0 && row_at(p, first - 1) == row_at(p, first);
  float sum[kVectors][kCount] = {};
  uint64_t next = first + l0 < end ? p.order[first + l0] : 0;
  for (int64_t base = first; base < end; base += lanes) {
    const int size = static_cast<int>(min(static_cast<int64_t>(lanes), end - base));
    const int64_t mine = base + l0;
    Work<kOptimizer> own{};
    if (mine < end) {
      const uint64_t word = next;
      const Entry entry(p, place, word);
      own.grad = entry.grad;
      own.factor = entry.factor;
      own.dim = place.target.any_kind ? 0 : place.feature.dim;  // nothing is read of what is another kernel's
      own.changes = place.target.rows != nullptr && !place.target.any_kind;
      own.row = RowPlace::of(place.target, kOptimizer, entry.row, place.feature.dim, sizeof(T));
      own.ends = mine + 1 == nnz || row_at(p, mine + 1) != word >> p.shift;
      if (mine + lanes < end) next = p.order[mine + lanes];
    }
    __syncwarp(mask);
    for (int k = 0; k < size; k += kDepth) {
      uint4 grad[kDepth][kVectors];
      RowPart<kOptimizer, T, uint4> part[kDepth][kVectors];
      Work<kOptimizer> work[kDepth];
      float row_state[kDepth];
#pragma unroll
      for (int u = 0; u < kDepth; ++u) {
        work[u] = own.from(mask, min(k + u, size - 1), lanes);
        const bool writes = work[u].ends && work[u].changes && k + u < size;
        if constexpr (kOptimizer == kRowwiseAdagrad) row_state[u] = writes ? *work[u].row.state : 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int column = first_column + v * column_step;
          grad[u][v] = uint4();
          if (column >= work[u].dim) continue;
          grad[u][v] = __ldg(reinterpret_cast<const uint4*>(work[u].grad + column * sizeof(T)));
          if (writes) part[u][v].load(work[u].row, column);
        }
      }
#pragma unroll
      for (int u = 0; u < kDepth; ++u) {
        if (k + u >= size) break;
        const Work<kOptimizer>& w = work[u];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          float value[kCount];
          Pack<T, uint4>::unpack(grad[u][v], value);
#pragma unroll
          for (int i = 0; i < kCount; ++i) sum[v][i] = fmaf(w.factor, value[i], sum[v][i]);
        }
        if (!w.ends && base + k + u + 1 < end) continue;
        if (w.ends && !began_before) {
          float square = 0.0f;
          if constexpr (kOptimizer == kRowwiseAdagrad) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
#pragma unroll
              for (int i = 0; i < kCount; ++i) square = fmaf(sum[v][i], sum[v][i], square);
            square = sum_over(square, lanes, mask) / static_cast<float>(w.dim);
          }
          if (w.changes) {
            const float rate = rate_of(optimizer, w.row.state, row_state[u], square, first_column == 0);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
              const int column = first_column + v * column_step;
              if (column < w.dim) part[u][v].apply(optimizer, w.row, column, sum[v], rate);
            }
          }
        } else {
          float* partial = (w.ends ? p.head : p.tail) + unit * p.width;
#pragma unroll
          for (int v = 0; v < kVectors; ++v)
            if (first_column + v * column_step < w.dim) store_floats<kCount>(partial + first_column + v * column_step, sum[v]);
        }
        began_before = false;
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
#pragma unroll
          for (int i = 0; i < kCount; ++i) sum[v][i] = 0.0f;
      }
    }
  }
}

// The row that goes on after a unit in which it began has partial sums in that unit's tail, in the tails of the units that it
// fills, and in the head of the one that it ends in. How many units after the first; 0: there is no such row.
__device__ __forceinline__ int64_t span_of(const UpdateParams& p, int64_t unit) {
  const int64_t nnz = p.lookups.nnz, first = unit * kUnit, end = first + kUnit;
  if (end >= nnz) return 0;
  const uint64_t row = row_at(p, end - 1);
  if (row_at(p, end) != row) return 0;
  if (first > 0 && row_at(p, first - 1) == row) return 0;  // began before
  if (row_at(p, min(end + kUnit, nnz) - 1) != row) return 1;
  int64_t low = end, high = nnz;  // the first word of another row
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (row_at(p, middle) == row) low = middle + 1;
    else high = middle;
  }
  return (low - 1) / kUnit - unit;
}

// One column of a span's partial sums [begin, end), of which the first unit's has number 0.
__device__ __forceinline__ float add_partials(const UpdateParams& p, int64_t unit, int64_t begin, int64_t end, int64_t span, int column) {
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t k = begin; k < end; ++k) sum += (k == span ? p.head : p.tail)[(unit + k) * p.width + column];
  return sum;
}

// A row whose sum lies in memory, by one warp.
template <int kOptimizer, class T>
__device__ __forceinline__ void apply_row(const Applied<kOptimizer>& optimizer, const Place& place, int64_t row, const float* sum) {
  const int dim = place.feature.dim;
  if (place.target.rows == nullptr) return;
  const RowPlace to = RowPlace::of(place.target, kOptimizer, row, dim, sizeof(T));
  float square = 0.0f, state = 0.0f;
  if constexpr (kOptimizer == kRowwiseAdagrad) {
    for (int column = lane(); column < dim; column += 32) square = fmaf(sum[column], sum[column], square);
    square = sum_over(square, 32, kAllLanes) / static_cast<float>(dim);
    state = *to.state;
    __syncwarp();
  }
  const float rate = rate_of(optimizer, to.state, state, square, lane() == 0);
  for (int column = lane(); column < dim; column += 32) {
    RowPart<kOptimizer, T, T> part;
    part.load(to, column);
    part.apply(optimizer, to, column, sum + column, rate);
  }
}

// A warp looks after kUnitsAWarp units; spans too long for one warp are added up by the whole block, each warp a fixed part.
template <int kOptimizer, class T>
__global__ void __launch_bounds__(kThreads) spans_kernel(const __grid_constant__ UpdateParams p, int64_t units) {
  extern __shared__ float sums[];  // [kWarps, width]
  __shared__ int64_t spans[kWarps * kUnitsAWarp];
  if (suppressed<kOptimizer>(p)) return;
  const Applied<kOptimizer> optimizer(p.optimizer);
  const int warp = threadIdx.x / 32, width = p.width;
  const int64_t first_unit = static_cast<int64_t>(blockIdx.x) * kWarps * kUnitsAWarp;
  if (threadIdx.x < kWarps * kUnitsAWarp) {
    const int64_t unit = first_unit + threadIdx.x;
    spans[threadIdx.x] = unit < units ? span_of(p, unit) : 0;
  }
  __syncthreads();
  float* mine = sums + warp * width;

  for (int n = warp; n < kWarps * kUnitsAWarp; n += kWarps) {
    const int64_t span = spans[n], unit = first_unit + n;
    if (span == 0 || span > kShortSpan) continue;
    Place place{};
    const Entry entry(p, place, p.order[(unit + 1) * kUnit - 1]);
    if (place.target.any_kind) continue;
    for (int column = lane(); column < place.feature.dim; column += 32) mine[column] = add_partials(p, unit, 0, span + 1, span, column);
    __syncwarp();
    apply_row<kOptimizer, T>(optimizer, place, entry.row, mine);
    __syncwarp();
  }
  for (int n = 0; n < kWarps * kUnitsAWarp; ++n) {
    if (spans[n] <= kShortSpan) continue;
    __syncthreads();
    const int64_t unit = first_unit + n, parts = spans[n] + 1;
    Place place{};
    const Entry entry(p, place, p.order[(unit + 1) * kUnit - 1]);
    if (place.target.any_kind) continue;
    for (int column = lane(); column < place.feature.dim; column += 32)
      mine[column] = add_partials(p, unit, parts * warp / kWarps, parts * (warp + 1) / kWarps, spans[n], column);
    __syncthreads();
    if (warp == 0) {
      for (int column = lane(); column < place.feature.dim; column += 32)
        for (int other = 1; other < kWarps; ++other) mine[column] += sums[other * width + column];
      __syncwarp();
      apply_row<kOptimizer, T>(optimizer, place, entry.row, mine);
    }
  }
}

// Rows of any width and alignment: a warp at the first word of each row adds up the row's words into `head`, which has a row of
// `width` floats a warp here. Words go in parts of 32, each lane finding out about one, and the parts' sums into the whole: a
// row of many words would lose digits in one long sum.
template <int kOptimizer, class T>
__global__ void __launch_bounds__(kThreads) any_rows_kernel(const __grid_constant__ UpdateParams p) {
  if (suppressed<kOptimizer>(p)) return;
  const Applied<kOptimizer> optimizer(p.optimizer);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32, step = static_cast<int64_t>(gridDim.x) * kWarps;
  float* sum = p.head + warp * p.width;
  for (int64_t i = warp; i < p.lookups.nnz; i += step) {
    const uint64_t row = row_at(p, i);
    if (i > 0 && row_at(p, i - 1) == row) continue;
    Place place{};
    const Entry entry(p, place, p.order[i]);
    if (!place.target.any_kind) continue;
    const int dim = place.feature.dim;
    for (int column = lane(); column < dim; column += 32) sum[column] = 0.0f;
    Place own = place;
    int size = 32;
    for (int64_t base = i; size == 32; base += 32) {
      const int64_t mine = base + lane();
      const bool of_row = mine < p.lookups.nnz && row_at(p, mine) == row;
      size = __popc(__ballot_sync(kAllLanes, of_row));  // they lie together
      const Entry word = of_row ? Entry(p, own, p.order[mine]) : Entry(entry);
      for (int first = 0; first < dim; first += 32) {
        const int column = min(first + lane(), dim - 1);
        float part = 0.0f;
#pragma unroll 8
        for (int k = 0; k < size; ++k) {
          const auto* grad = reinterpret_cast<const T*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(word.grad), k));
          part = fmaf(__shfl_sync(kAllLanes, word.factor, k), to_float(grad[column]), part);
        }
        if (first + lane() < dim) sum[column] += part;
      }
    }
    __syncwarp();
    apply_row<kOptimizer, T>(optimizer, place, entry.row, sum);
    __syncwarp();
  }
}

__global__ void count_step_kernel(int64_t* step, const int32_t* halted) {
  if (*halted == 0) *step += 1;
}

// The gradient of per-sample weights: a lookup's row times its bag's gradient.
template <class T, class Index>
__global__ void __launch_bounds__(kThreads) weights_kernel(const __grid_constant__ Lookups l, const char* grad, int64_t grad_stride, float* out) {
  const int64_t bag = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (bag >= l.num_features * l.batch) return;
  const Feature f = l.features[bag / l.batch];
  const auto* offsets = static_cast<const Index*>(l.offsets);
  const int64_t begin = max(static_cast<int64_t>(offsets[bag]), int64_t{0}), end = min(static_cast<int64_t>(offsets[bag + 1]), l.nnz);
  const float scale = l.mean && end - begin > 1 ? 1.0f / static_cast<float>(end - begin) : 1.0f;
  const auto* mine = reinterpret_cast<const T*>(grad + bag % l.batch * grad_stride + f.packed);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = valid_row(static_cast<const Index*>(l.indices)[i], f.rows, l.policy);
    const auto* weights = reinterpret_cast<const T*>(f.table) + max(row, int64_t{0}) * f.dim;
    float dot = 0.0f;
    for (int d = lane(); row >= 0 && d < f.dim; d += 32) dot = fmaf(to_float(mine[d]), to_float(weights[d]), dot);
    for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_xor_sync(kAllLanes, dot, offset);
    if (lane() == 0) out[i] = row >= 0 ? dot * scale : __int_as_float(0x7FC00000);
  }
}

template <class F>
int with_optimizer(int optimizer, F&& f) {
  switch (optimizer) {
    case kPlain: return f(std::integral_constant<int, kPlain>());
    case kSgd: return f(std::integral_constant<int, kSgd>());
    case kAdagrad: return f(std::integral_constant<int, kAdagrad>());
    case kRowwiseAdagrad: return f(std::integral_constant<int, kRowwiseAdagrad>());
    case kAdam: return f(std::integral_constant<int, kAdam>());
    default: return static_cast<int>(cudaErrorInvalidValue);
  }
}

}  // namespace fused_ops

using namespace fused_ops;

extern "C" {

int fo_cuda_update_load() {
  for (int dtype = 0; dtype < 3; ++dtype)
    for (int optimizer = kPlain; optimizer <= kAdam; ++optimizer) {
      const int failed = with_dtype(dtype, [&](auto value) {
        using T = decltype(value);
        return with_optimizer(optimizer, [&](auto o) {
          return std::max({load(units_kernel<o.value, T, 1>), load(units_kernel<o.value, T, 2>), load(units_kernel<o.value, T, 4>),
                           load(spans_kernel<o.value, T>), load(any_rows_kernel<o.value, T>), load(weights_kernel<T, int32_t>),
                           load(weights_kernel<T, int64_t>)});
        });
      });
      if (failed) return failed;
    }
  return load(count_step_kernel);
}

int64_t fo_cuda_update_params_bytes() { return sizeof(UpdateParams); }

// Floats of scratch. vectors: of 16 bytes, that a lane has of a row (1, 2 or 4); 0: all tables are of any kind. width, any_width:
// floats of the widest row of the tables that are moved by vectors, and of those of any kind (0: there are none).
int64_t fo_cuda_update_scratch(int64_t nnz, int vectors, int width, int any_width) {
  const int64_t units = vectors ? (nnz + kUnit - 1) / kUnit : 0;
  return 2 * units * width + static_cast<int64_t>(kAnyRowsBlocks) * kWarps * any_width;
}

int fo_cuda_update(UpdateParams* p, int dtype, int optimizer, int vectors, int any_width, float* scratch, int64_t* step, void* stream) {
  const int64_t units = (p->lookups.nnz + kUnit - 1) / kUnit;
  auto* s = static_cast<cudaStream_t>(stream);
  p->head = scratch;
  p->tail = scratch + units * p->width;
  UpdateParams any = *p;
  any.head = vectors ? scratch + 2 * units * p->width : scratch;
  any.width = any_width;
  const auto blocks = static_cast<unsigned>((units * p->lanes + kThreads - 1) / kThreads);
  const auto span_blocks = static_cast<unsigned>((units + kWarps * kUnitsAWarp - 1) / (kWarps * kUnitsAWarp));
  const size_t span_bytes = static_cast<size_t>(kWarps) * p->width * sizeof(float);
  if (units > 0) {
    const int code = with_dtype(dtype, [&](auto value) {
      using T = decltype(value);
      return with_optimizer(optimizer, [&](auto o) {
        if (vectors == 1) units_kernel<o.value, T, 1><<<blocks, kThreads, 0, s>>>(*p);
        else if (vectors == 2) units_kernel<o.value, T, 2><<<blocks, kThreads, 0, s>>>(*p);
        else if (vectors == 4) units_kernel<o.value, T, 4><<<blocks, kThreads, 0, s>>>(*p);
        if (vectors > 0) spans_kernel<o.value, T><<<span_blocks, kThreads, span_bytes, s>>>(*p, units);
        if (any_width) any_rows_kernel<o.value, T><<<kAnyRowsBlocks, kThreads, 0, s>>>(any);
        return static_cast<int>(cudaGetLastError());
      });
    });
    if (code) return code;
  }
  if (step) count_step_kernel<<<1, 1, 0, s>>>(step, p->halted);
  return static_cast<int>(cudaGetLastError());
}

int fo_cuda_weights_gradient(const Lookups* l, int dtype, int index_bytes, const char* grad, int64_t grad_stride, float* out, void* stream) {
  const int64_t threads = l->num_features * l->batch * 32;
  if (threads == 0) return 0;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  return with_dtype(dtype, [&](auto value) {
    using T = decltype(value);
    auto* s = static_cast<cudaStream_t>(stream);
    if (index_bytes == 4) weights_kernel<T, int32_t><<<blocks, kThreads, 0, s>>>(*l, grad, grad_stride, out);
    else weights_kernel<T, int64_t><<<blocks, kThreads, 0, s>>>(*l, grad, grad_stride, out);
    return static_cast<int>(cudaGetLastError());
  });
}

}  // extern "C"
