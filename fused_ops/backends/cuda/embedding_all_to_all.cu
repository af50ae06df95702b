// Pooled lookups stored straight into the outputs of the ranks that own the samples, and the same lookups alone.
#include <cuda_runtime.h>

#include "cuda_lookup.cuh"

namespace fused_ops {

#ifndef FO_EMBEDDING_THREADS
#define FO_EMBEDDING_THREADS 512
#endif
constexpr int kThreads = FO_EMBEDDING_THREADS;  // of the one block that a call has on an SM
constexpr int kLookupThreads = 256;
constexpr uint32_t kTilesAWarp = 2;  // of the lookups alone

struct EmbeddingParams {
  CallParams call;
  Lookups lookups;
  const int64_t* run_column;      // bytes: runs of adjacent columns of each rank's features in the output, for copies out
  const int64_t* run_width;
  int64_t output_stride;          // bytes of a row of any rank's output
  int64_t sample_begin[kMaxRanks + 1];
  int32_t run_begin[kMaxRanks + 1];
  int32_t copy_rows;              // rows of a tile that copies out
};

template <class T, class Index>
__global__ void __launch_bounds__(kThreads, 1) embedding_kernel(const __grid_constant__ EmbeddingParams p) {
  __shared__ Shared shared;
  Call call(p.call, &shared);
  const Lookups& l = p.lookups;
  const int rank = p.call.link.rank, slices = p.call.slices;
  check_offset_ends<Index>(l, p.call.state, rank);
  char* const slot = call.my_slot();
  const bool copies_out = slot != p.call.output;
  auto begin = [&](int r, int slice, int of) { return slice_begin(p.sample_begin[r + 1] - p.sample_begin[r], slice, of); };

  call.run([&](int r, int slice, int of) { return lookup_tiles(l, begin(r, slice + 1, of) - begin(r, slice, of)); },
           [&](int, int slice) {
             const int64_t rows = begin(rank, slice + 1, slices) - begin(rank, slice, slices);
             return copies_out && rows > 0 ? static_cast<uint32_t>(chunks_of(rows, p.copy_rows)) : 1u;
           },
           copies_out,
           [&](char* to, int r, int slice, int of, uint32_t tile, uint32_t n) {
             const int64_t first = begin(r, slice, of), samples = begin(r, slice + 1, of) - first;
             lookup_run<T, Index>(l, p.sample_begin[r] + first, samples, tile, n, to + first * p.output_stride, p.output_stride, false,
                                  p.call.state, rank);
           },
           [&](int source, int slice, uint32_t tile, uint32_t n) {
             if (!copies_out) return;
             const int64_t tile_rows = p.copy_rows, first = begin(rank, slice, slices) + tile * tile_rows;
             const int rows = static_cast<int>(min(n * tile_rows, begin(rank, slice + 1, slices) - first));
             for (int run = p.run_begin[source]; run < p.run_begin[source + 1]; ++run) {
               const int64_t at = first * p.output_stride + p.run_column[run];
               put_slice(p.call.output + at, p.output_stride, slot + at, p.output_stride, rows, static_cast<int>(p.run_width[run]));
             }
           });
}

// The lookups alone, of the whole batch: out [B, D], features side by side. Bad values fail the exchange that follows.
template <class T, class Index>
__global__ void __launch_bounds__(kLookupThreads, 2) lookup_kernel(const __grid_constant__ Lookups l, char* out, int64_t stride,
                                                                         State* state, int rank) {
  check_offset_ends<Index>(l, state, rank);
  const uint32_t tiles = lookup_tiles(l, l.batch), tile = (blockIdx.x * (kLookupThreads / 32) + threadIdx.x / 32) * kTilesAWarp;
  if (tile < tiles) lookup_run<T, Index>(l, 0, l.batch, tile, min(kTilesAWarp, tiles - tile), out, stride, true, state, rank);
}

template <class F>
int with_types(int dtype, int index_bytes, F&& f) {
  return with_dtype(dtype, [&](auto value) {
    return index_bytes == 4 ? f(value, int32_t()) : f(value, int64_t());
  });
}

}  // namespace fused_ops

using namespace fused_ops;

extern "C" {

int64_t fo_cuda_feature_bytes() { return sizeof(Feature); }
int64_t fo_cuda_embedding_params_bytes() { return sizeof(EmbeddingParams); }
int fo_cuda_embedding_warps() { return kThreads / 32; }

int fo_cuda_embedding_all_to_all_load() {
  for (int dtype = 0; dtype < 3; ++dtype)
    for (int bytes = 4; bytes <= 8; bytes += 4) {
      const int code = with_types(dtype, bytes, [](auto value, auto index) {
        const int failed = prepare(embedding_kernel<decltype(value), decltype(index)>);
        return failed ? failed : load(lookup_kernel<decltype(value), decltype(index)>);
      });
      if (code) return code;
    }
  return 0;
}

int fo_cuda_embedding_all_to_all(const EmbeddingParams* p, int dtype, int index_bytes, int blocks, void* stream) {
  return with_types(dtype, index_bytes, [&](auto value, auto index) {
    embedding_kernel<decltype(value), decltype(index)><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*p);
    return static_cast<int>(cudaGetLastError());
  });
}

int fo_cuda_embedding_lookup(const Lookups* l, int dtype, int index_bytes, char* out, int64_t stride, State* state, int rank, void* stream) {
  const unsigned tiles = kLookupThreads / 32 * kTilesAWarp, blocks = (lookup_tiles(*l, l->batch) + tiles - 1) / tiles;
  return with_types(dtype, index_bytes, [&](auto value, auto index) {
    lookup_kernel<decltype(value), decltype(index)>
        <<<blocks, kLookupThreads, 0, static_cast<cudaStream_t>(stream)>>>(*l, out, stride, state, rank);
    return static_cast<int>(cudaGetLastError());
  });
}

}  // extern "C"
