// Rows of fp32, fp16 and bf16 tables as the vectors that a lane moves at once, and their elements as floats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fused_ops {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// `Raw` holds kCount elements of T.
template <class T, class Raw>
struct Pack {
  static constexpr int kCount = sizeof(Raw) / sizeof(T);

  static __device__ __forceinline__ void unpack(const Raw& raw, float* out) {
    const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = to_float(elements[i]);
  }
  static __device__ __forceinline__ Raw pack(const float* in) {
    Raw raw;
    T* elements = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements[i] = from_float<T>(in[i]);
    return raw;
  }
};

// kCount floats at an address of their size's alignment (at most 16 bytes).
template <int kCount>
__device__ __forceinline__ void load_floats(const float* from, float* out) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + i);
      out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = from[i];
  }
}

template <int kCount>
__device__ __forceinline__ void store_floats(float* to, const float* in) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) *reinterpret_cast<float4*>(to + i) = make_float4(in[i], in[i + 1], in[i + 2], in[i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = in[i];
  }
}

// Calls f(T()) for the dtype's code: 0 fp32, 1 fp16, 2 bf16.
template <class F>
auto with_dtype(int dtype, F&& f) {
  return dtype == 0 ? f(float()) : dtype == 1 ? f(__half()) : f(__nv_bfloat16());
}

}  // namespace fused_ops
