// Products of a few input rows with a tall weight that is read once: weights go from memory into registers, many 16-byte loads
// ahead of use, and from there into the tensor cores (fp16, bf16) or multiply-adds (fp32).
//
// The order of k within a sum is free. A lane of a quad takes 16 neighbouring bytes of k of a row as its part of two steps of
// the tensor cores, so that weights need not pass through shared memory; the input lies there in the order that fits.
#pragma once

#include "cuda_link.cuh"
#include "cuda_rows.cuh"

namespace fused_ops {

constexpr int kChunkBytes = 64;  // of k: what a quad takes of a row at a time
constexpr int kInputPad = 16;    // bytes after each row in shared memory, whose size is a multiple of 128: no bank conflicts

// By rows: of which neighbours in k are neighbours in memory, and aligned to 16 bytes. By columns: neighbours in N are so.
enum class WeightLayout : int32_t { kByRows = 0, kByColumns = 1, kAnyStrides = 2 };

struct Weights {
  const char* data;
  int64_t row_stride, column_stride;  // bytes from one n, and from one k, to the next
  int64_t inner;                      // k
};

// Past this rank's caches, as it is read once. Where not `valid`, nothing is read, and `to` stays as it is.
__device__ __forceinline__ void load_streamed(uint32_t (&to)[4], const char* from, bool valid) {
  const int read = valid;
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4]; }" : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3]) : "l"(from), "r"(read));
}
__device__ __forceinline__ void load_streamed(uint32_t (&to)[2], const char* from, bool valid) {
  const int read = valid;
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; @p ld.global.nc.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2]; }" : "+r"(to[0]), "+r"(to[1]) : "l"(from), "r"(read));
}

// Four bytes into shared memory, of which `bytes` are read and the rest is zero.
__device__ __forceinline__ void copy_async(char* to, const char* from, int bytes) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four matrices of 8 x 8 from shared memory: lane 8 i + r says where row r of matrix i is, and gets two elements of each.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const char* row) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared) : "memory");
}

__device__ __forceinline__ void multiply_tile(__nv_bfloat16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_tile(__half, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One lane's part of kRows rows of the weight, chunks of k one after the other. By rows (and any strides): 16 bytes of k of the
// rows g, g + 8, ... By columns: kRows / 8 neighbouring rows of each k that it takes. g: the quad's number in the warp.
template <class T, WeightLayout kLayout, int kRows>
class WeightLoads {
 public:
  static constexpr int kWords = kRows / 2;  // of a chunk
  static constexpr bool kByColumns = kLayout == WeightLayout::kByColumns;
  static constexpr int kElements = kChunkBytes / sizeof(T), kTake = 16 / sizeof(T);  // of k: of a chunk, and of that by a lane

  // Of `rows` rows, at most kRows, of which the first is `first`; none is read beyond. The first k is that of `chunk`.
  __device__ WeightLoads(const Weights& w, int64_t first, int rows, int64_t chunk) : w_(w), rows_(rows) {
    const int64_t row = first + quad() * (kByColumns ? kRows / 8 : 1), k = chunk * kElements + place() * kTake;
    from_ = w.data + row * row_bytes() + k * column_bytes();
    left_ = w.inner - k;
  }

  __device__ __forceinline__ void skip(int chunks) {
    from_ += static_cast<int64_t>(chunks) * kElements * column_bytes();
    left_ -= static_cast<int64_t>(chunks) * kElements;
  }

  // Chunk d from here on. kWhole: all of its k are there. Else zeros come for those that are not. What comes for rows that are
  // not there is any value.
  template <bool kWhole>
  __device__ __forceinline__ void load(uint32_t (&words)[kWords], int d) const {
    const char* at = from_ + d * kElements * column_bytes();
    const int64_t left = left_ - d * kElements;
    if constexpr (!kWhole)
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = 0;
    if constexpr (kByColumns) {
      constexpr int kVector = kWords / kTake;
      const bool are_rows = quad() * (kRows / 8) < rows_;
#pragma unroll
      for (int e = 0; e < kTake; ++e) {
        auto& vector = reinterpret_cast<uint32_t(&)[kVector]>(words[e * kVector]);
        load_streamed(vector, at, are_rows && (kWhole || e < left));
        at += column_bytes();
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRows / 8; ++r) {
        auto& vector = reinterpret_cast<uint32_t(&)[4]>(words[4 * r]);
        const bool is_row = quad() + 8 * r < rows_;
        if constexpr (kLayout == WeightLayout::kByRows) {
          load_streamed(vector, at, is_row && (kWhole || 0 < left));
        } else {
          T elements[kTake];
#pragma unroll
          for (int e = 0; e < kTake; ++e)
            elements[e] = is_row && e < left ? *reinterpret_cast<const T*>(at + e * column_bytes()) : from_float<T>(0.0f);
          memcpy(&vector, elements, sizeof vector);
        }
        at += 8 * row_bytes();
      }
    }
  }

  static __device__ __forceinline__ int quad() { return static_cast<int>(threadIdx.x & 31) >> 2; }
  static __device__ __forceinline__ int place() { return static_cast<int>(threadIdx.x & 3); }

 private:
  const Weights& w_;
  const char* from_;
  int64_t left_;  // of k, from this lane's first on
  const int rows_;

  __device__ __forceinline__ int64_t row_bytes() const { return kByColumns ? int64_t{sizeof(T)} : w_.row_stride; }
  __device__ __forceinline__ int64_t column_bytes() const {
    return kLayout == WeightLayout::kByRows ? int64_t{sizeof(T)} : w_.column_stride;
  }
};

// What one warp adds up: kRows rows of the weight times kMostInputs rows of the input.
//
// Tensor cores: products of 16 rows of the input (or 8 and nothing) with 8 of the weight, whose loads are fragments as they
// are. Eight rows are neighbours, by columns every (kRows / 8)th.
template <class T, WeightLayout kLayout, int kMostInputs>
struct WarpProduct {
  static constexpr int kInputs = kMostInputs, kInputTiles = (kInputs + 15) / 16;
  static constexpr int kTiles = kInputs <= 16 ? 8 : 4, kRows = 8 * kTiles;
  static constexpr int kDepth = kInputs <= 16 ? 2 : 4;          // chunks under way
  static constexpr int kMaxThreads = kInputs == 8 ? 512 : 384;  // of a block, so that registers suffice
  using Loads = WeightLoads<T, kLayout, kRows>;

  float sum[kInputTiles][kTiles][4] = {};

  // Where a word of a row's chunk lies in shared memory: what the lanes of a quad have of one step is together.
  static __device__ __forceinline__ int place_of(int word) { return word / 16 * 16 + word % 4 * 4 + word / 4 % 4; }

  // input: row 0 of this chunk in shared memory; `inputs` rows are there, at least one.
  __device__ __forceinline__ void add(const uint32_t (&words)[Loads::kWords], const char* input, int stride, int inputs) {
    const int l = lane(), row = l % 8;
    if constexpr (kInputs == 8) {
      uint32_t x[4];
      load_matrices(x, input + min(row, inputs - 1) * stride + l / 8 * 16);
#pragma unroll
      for (int step = 0; step < 2; ++step) multiply(0, {x[2 * step], 0u, x[2 * step + 1], 0u}, words, step);
    } else {
#pragma unroll
      for (int j = 0; j < kInputTiles; ++j) {
        if (16 * j >= inputs) break;
        const char* mine = input + min(16 * j + l / 8 % 2 * 8 + row, inputs - 1) * stride + l / 16 * 16;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t x[4];
          load_matrices(x, mine + step * 32);
          multiply(j, x, words, step);
        }
      }
    }
  }

  // to: [inputs][stride] floats.
  __device__ __forceinline__ void store(float* to, int stride, int inputs, int rows) const {
    const int g = Loads::quad(), t = Loads::place();
#pragma unroll
    for (int j = 0; j < kInputTiles; ++j)
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int input = 16 * j + c / 2 * 8 + g, column = 2 * t + c % 2;
          const int row = Loads::kByColumns ? kTiles * column + i : 8 * i + column;
          if (input < inputs && row < rows) to[input * stride + row] = sum[j][i][c];
        }
  }

 private:
  __device__ __forceinline__ void multiply(int j, const uint32_t (&x)[4], const uint32_t (&words)[Loads::kWords], int step) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if constexpr (Loads::kByColumns) {
        constexpr int kVector = Loads::kWords / Loads::kTake;
        uint32_t pairs[2];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int k = 4 * step + 2 * pair;
          pairs[pair] = __byte_perm(words[k * kVector + i / 2], words[(k + 1) * kVector + i / 2], i % 2 ? 0x7632 : 0x5410);
        }
        multiply_tile(T(), sum[j][i], x, pairs[0], pairs[1]);
      } else {
        multiply_tile(T(), sum[j][i], x, words[4 * i + 2 * step], words[4 * i + 2 * step + 1]);
      }
    }
  }
};

// Multiply-adds, exact products of fp32: each lane of a quad adds up its part of k, and the quad adds up its lanes.
template <WeightLayout kLayout, int kMostInputs>
struct WarpProduct<float, kLayout, kMostInputs> {
  static constexpr int kInputs = kMostInputs;
  static constexpr int kRows = 32, kDepth = kInputs == 8 ? 4 : 2, kMaxThreads = 512;
  using Loads = WeightLoads<float, kLayout, kRows>;

  float sum[kInputs][4] = {};

  static __device__ __forceinline__ int place_of(int word) { return word; }

  __device__ __forceinline__ void add(const uint32_t (&words)[Loads::kWords], const char* input, int stride, int inputs) {
    const char* mine = input + Loads::place() * 16;
#pragma unroll
    for (int j = 0; j < kInputs; ++j) {
      if (j >= inputs) break;
      const float4 v = *reinterpret_cast<const float4*>(mine + j * stride);
      const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int row = 0; row < 4; ++row)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          sum[j][row] = fmaf(__uint_as_float(words[Loads::kByColumns ? 4 * e + row : 4 * row + e]), x[e], sum[j][row]);
    }
  }

  __device__ __forceinline__ void store(float* to, int stride, int inputs, int rows) const {
    const int g = Loads::quad(), t = Loads::place();
#pragma unroll
    for (int j = 0; j < kInputs; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float whole = sum[j][r];
        whole += __shfl_xor_sync(0xFFFFFFFFu, whole, 1);
        whole += __shfl_xor_sync(0xFFFFFFFFu, whole, 2);
        const int row = Loads::kByColumns ? 4 * g + r : 8 * r + g;
        if (t == j % 4 && j < inputs && row < rows) to[j * stride + row] = whole;
      }
  }
};

// How the warps of a block share a tile: by groups of rows, then by groups of input rows, then by parts of k. They go through
// k in rounds of kDepth chunks a warp; the input is staged in shared memory by slabs of some rounds, two at a time.
struct TileShape {
  int32_t rows, group_rows;                      // of the weight: of a tile, of a warp
  int32_t row_groups, input_groups, k_groups;
  int32_t rounds, rounds_a_slab, slabs;          // slabs * rounds_a_slab >= rounds
  int32_t sum_stride;                            // floats
};

// Copies a slab of the input's rows into shared memory, a warp 128 bytes at a time; zeros past k.
template <class Product, class T>
__device__ __forceinline__ void stage_input(char* to, int stride, const char* input, int inputs, int64_t inner, int64_t first_byte,
                                            int bytes) {
  constexpr int kWord = 4, kPiece = 32 * kWord;
  const int64_t row_bytes = inner * static_cast<int64_t>(sizeof(T));
  const bool aligned = (reinterpret_cast<uint64_t>(input) | static_cast<uint64_t>(row_bytes)) % kWord == 0;
  const int l = lane(), place = Product::place_of(l) * kWord, step = static_cast<int>(blockDim.x >> 5) * kPiece;
  int at = static_cast<int>(threadIdx.x >> 5) * kPiece;
  for (int m = 0;; at += step) {
    for (; at >= bytes; at -= bytes)
      if (++m >= inputs) return;
    if (m >= inputs) return;
    const char* row = input + m * row_bytes;
    char* const target = to + m * stride + at + place;
    const int64_t byte = first_byte + at + l * kWord;
    if (aligned) {
      const bool inside = byte < row_bytes;
      copy_async(target, inside ? row + byte : input, inside ? kWord : 0);
    } else {
      T elements[kWord / sizeof(T)];
#pragma unroll
      for (int e = 0; e < static_cast<int>(kWord / sizeof(T)); ++e) {
        const int64_t k = byte / static_cast<int64_t>(sizeof(T)) + e;
        elements[e] = k < inner ? reinterpret_cast<const T*>(row)[k] : from_float<T>(0.0f);
      }
      memcpy(target, elements, kWord);
    }
  }
}

// One tile's product, by the whole block, into `memory`: [k_groups][inputs][sum_stride] floats, parts of k yet to be added up,
// behind a barrier. `memory` holds the input's slabs before. `meanwhile()` is done while the first loads are under way.
template <class Product, class T, class Meanwhile>
__device__ __forceinline__ void multiply_rows(char* memory, const TileShape& s, const Weights& w, const char* input, int inputs,
                                              int64_t first_row, int rows, Meanwhile&& meanwhile) {
  constexpr int kDepth = Product::kDepth;
  using Loads = typename Product::Loads;
  const int warp = static_cast<int>(threadIdx.x >> 5), groups = s.row_groups * s.input_groups;
  const int row_group = warp % s.row_groups, input_group = warp / s.row_groups % s.input_groups, k_group = warp / groups;
  const bool works = k_group < s.k_groups;
  const int round_bytes = s.k_groups * kDepth * kChunkBytes, slab_bytes = s.rounds_a_slab * round_bytes, stride = slab_bytes + kInputPad;
  const int my_first = row_group * s.group_rows, my_rows = works ? max(0, min(s.group_rows, rows - my_first)) : 0;
  const int first_input = input_group * Product::kInputs, my_inputs = min(Product::kInputs, inputs - first_input);
  Loads loads(w, first_row + my_first, my_rows, k_group * kDepth);

  // Rounds of which this warp's part of k is there to the last.
  const int64_t round_elements = static_cast<int64_t>(round_bytes) / static_cast<int64_t>(sizeof(T));
  const int64_t left = w.inner - static_cast<int64_t>(k_group + 1) * kDepth * kChunkBytes / static_cast<int64_t>(sizeof(T));
  const int whole = left < 0 ? 0 : static_cast<int>(left / round_elements) + 1;

  Product product;
  uint32_t words[kDepth][Loads::kWords] = {};
  if (s.slabs > 0) stage_input<Product, T>(memory, stride, input, inputs, w.inner, 0, slab_bytes);
#pragma unroll
  for (int d = 0; d < kDepth; ++d) loads.template load<false>(words[d], d);
  meanwhile();
  for (int slab = 0; slab < s.slabs; ++slab) {
    wait_copies();
    __syncthreads();  // this slab is here, and nobody looks at the one before any more
    char* const here = memory + (slab & 1) * inputs * stride;
    if (slab + 1 < s.slabs)
      stage_input<Product, T>(memory + (~slab & 1) * inputs * stride, stride, input, inputs, w.inner,
                              static_cast<int64_t>(slab + 1) * slab_bytes, slab_bytes);
    if (my_rows == 0) continue;
    const char* from = here + first_input * stride + k_group * kDepth * kChunkBytes;
    const int first = slab * s.rounds_a_slab, end = min(first + s.rounds_a_slab, s.rounds);
    for (int round = first; round < end; ++round, from += round_bytes) {
      loads.skip(s.k_groups * kDepth);
      if (round + 1 < whole) {
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          product.add(words[d], from + d * kChunkBytes, stride, my_inputs);
          loads.template load<true>(words[d], d);
        }
      } else {
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          product.add(words[d], from + d * kChunkBytes, stride, my_inputs);
          loads.template load<false>(words[d], d);
        }
      }
    }
  }
  __syncthreads();  // nobody looks at the input any more
  if (works)
    product.store(reinterpret_cast<float*>(memory) + (static_cast<int64_t>(k_group) * inputs + first_input) * s.sum_stride + my_first,
                  s.sum_stride, my_inputs, my_rows);
  __syncthreads();
}

}  // namespace fused_ops
