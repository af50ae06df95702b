// What becomes of a row's summed gradient: FBGEMM's exact optimizers, in fp32, or a dense gradient.
#pragma once

#include "cuda_rows.cuh"

namespace fused_ops {

enum Optimizer : int32_t { kPlain = 0, kSgd = 1, kAdagrad = 2, kRowwiseAdagrad = 3, kAdam = 4 };

// What changes of a table: the table itself or its dense gradient (plain), and the states; null = leave it alone.
struct Target {
  char* rows;
  float *state, *second_state;
  int64_t any_kind;  // too wide, or not aligned, for the kernels that move 16 bytes a lane
};

struct OptimizerParams {
  const float* learning_rate;  // on the device, as the step: a captured graph reads what they are when it runs
  const int64_t* step;         // Adam: backwards before this one
  float eps, beta1, beta2;
};

// The constants of one launch, ready to be applied.
template <int kOptimizer>
struct Applied {
  float rate, eps, beta1, beta2, m_part, v_part;

  __device__ explicit Applied(const OptimizerParams& p) {
    rate = kOptimizer == kPlain ? 0.0f : *p.learning_rate;
    eps = p.eps, beta1 = p.beta1, beta2 = p.beta2;
    if constexpr (kOptimizer == kAdam) {
      const auto step = static_cast<float>(*p.step + 1);
      m_part = 1.0f - powf(beta1, step);
      v_part = 1.0f - powf(beta2, step);
    }
  }
};

// What a step is multiplied by: the learning rate, and for row-wise Adagrad over the root of the row's state, `state` being the
// one before this step and `square` the mean square of the row's gradient. One lane of the row writes the state.
template <int kOptimizer>
__device__ __forceinline__ float rate_of(const Applied<kOptimizer>& o, float* row_state, float state, float square, bool writes) {
  if constexpr (kOptimizer != kRowwiseAdagrad) return o.rate;
  state += square;
  if (writes) *row_state = state;
  return o.rate / (sqrtf(state) + o.eps);
}

// Where a row lies that is to be changed, and its states: [dim] each, row-wise Adagrad's state is one float.
struct RowPlace {
  char* weights;
  float *state, *second_state;

  __device__ __forceinline__ static RowPlace of(const Target& t, int optimizer, int64_t row, int dim, int element_bytes) {
    const int64_t at = row * dim;
    return {t.rows + at * element_bytes, t.state + (optimizer == kRowwiseAdagrad ? row : at), t.second_state + at};
  }
};

// A lane's part of a row: kCount elements from `column` on.
template <int kOptimizer, class T, class Raw>
struct RowPart {
  static constexpr int kCount = Pack<T, Raw>::kCount;
  Raw weights;
  float state[kOptimizer == kAdagrad || kOptimizer == kAdam ? kCount : 1];
  float second[kOptimizer == kAdam ? kCount : 1];

  // What can be read before the sum is known, so that its latency is hidden.
  __device__ __forceinline__ void load(const RowPlace& place, int column) {
    if constexpr (kOptimizer != kPlain) weights = __ldcg(reinterpret_cast<const Raw*>(place.weights + column * sizeof(T)));
    if constexpr (kOptimizer == kAdagrad || kOptimizer == kAdam) load_floats<kCount>(place.state + column, state);
    if constexpr (kOptimizer == kAdam) load_floats<kCount>(place.second_state + column, second);
  }

  __device__ __forceinline__ void apply(const Applied<kOptimizer>& o, const RowPlace& place, int column, const float* sum, float rate) {
    auto* to = reinterpret_cast<Raw*>(place.weights + column * sizeof(T));
    if constexpr (kOptimizer == kPlain) {
      *to = Pack<T, Raw>::pack(sum);
    } else {
      float w[kCount];
      Pack<T, Raw>::unpack(weights, w);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if constexpr (kOptimizer == kAdagrad) {
          state[i] += sum[i] * sum[i];
          w[i] -= rate * sum[i] / (sqrtf(state[i]) + o.eps);
        } else if constexpr (kOptimizer == kAdam) {
          state[i] = o.beta1 * state[i] + (1.0f - o.beta1) * sum[i];
          second[i] = o.beta2 * second[i] + (1.0f - o.beta2) * sum[i] * sum[i];
          w[i] -= rate * (state[i] / o.m_part) / (sqrtf(second[i] / o.v_part) + o.eps);
        } else {
          w[i] -= rate * sum[i];
        }
      }
      *to = Pack<T, Raw>::pack(w);
      if constexpr (kOptimizer == kAdagrad || kOptimizer == kAdam) store_floats<kCount>(place.state + column, state);
      if constexpr (kOptimizer == kAdam) store_floats<kCount>(place.second_state + column, second);
    }
  }
};

}  // namespace fused_ops
