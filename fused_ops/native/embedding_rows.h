// Rows of fp32, fp16 and bf16 tables as vectors of 16 floats: load, store (to nearest even), prefetch.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace fused_ops {

constexpr int kLanes = 16;
typedef float Float16x __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits16x __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Short16x __attribute__((vector_size(kLanes * 2)));

struct Half { uint16_t bits; };
struct BFloat { uint16_t bits; };

inline float to_float(float x) { return x; }
inline float to_float(BFloat x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline float to_float(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  _Float16 h;
  memcpy(&h, &x, 2);
  return static_cast<float>(h);
#endif
}

inline void from_float(float f, float* out) { *out = f; }
inline void from_float(float f, BFloat* out) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  out->bits = f != f ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void from_float(float f, Half* out) {
#if defined(__F16C__)
  out->bits = _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
  const _Float16 h = static_cast<_Float16>(f);
  memcpy(out, &h, 2);
#endif
}

inline Float16x load(const float* p) {
  Float16x v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline Float16x load(const BFloat* p) {
  Short16x s;
  memcpy(&s, p, sizeof s);
  return reinterpret_cast<Float16x>(__builtin_convertvector(s, Bits16x) << 16);
}
inline Float16x load(const Half* p) {
  Float16x v;
#if defined(__AVX512F__)
  const __m512 h = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  memcpy(&v, &h, sizeof v);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
#endif
  return v;
}

inline void store(Float16x v, float* p) { memcpy(p, &v, sizeof v); }
inline void store(Float16x v, BFloat* p) {
  const Bits16x bits = reinterpret_cast<Bits16x>(v);
  const Bits16x nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits16x nan = reinterpret_cast<Bits16x>(v != v);  // all ones where NaN
  const Short16x s = __builtin_convertvector((nan & 0x7fc0) | (~nan & nearest), Short16x);
  memcpy(p, &s, sizeof s);
}
inline void store(Float16x v, Half* p) {
#if defined(__AVX512F__)
  __m512 f;
  memcpy(&f, &v, sizeof f);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) from_float(v[i], p + i);
#endif
}

// Asks for `bytes` from `p` on. Read, or about to be written.
template <bool Write = false>
inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at, Write, 3);
}

// Asks for `bytes` from `p` on, into the second-level cache.
inline void prefetch_far(const void* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 128) __builtin_prefetch(static_cast<const char*>(p) + at, 0, 2);
}

enum Dtype : int32_t { kFloat = 0, kHalf = 1, kBFloat = 2 };

// Calls body(T{}) with the element type of that code.
template <class Body>
void with_dtype(int32_t dtype, Body body) {
  if (dtype == kFloat) body(float{});
  else if (dtype == kHalf) body(Half{});
  else body(BFloat{});
}

}  // namespace fused_ops
