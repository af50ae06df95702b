// Rows of strided columns to the ranks that want them: the gradients' way back to the table owners, and the exchange that
// follows lookups which are not fused with it.
#include <cuda_runtime.h>

#include "cuda_call.cuh"
#include "cuda_rows.cuh"

namespace fused_ops {

constexpr int kThreads = 512;  // of the one block that a call has on an SM

// Bytes: adjacent columns of a row, where they come from and where they go.
struct Run {
  int64_t from, to;
  int64_t width;
};

struct RowsParams {
  CallParams call;
  const char* input;
  const Run *send_runs, *receive_runs;  // by destination, by source; `to` is a column of the receiver's rows
  int64_t input_stride;
  float divisor;
  int32_t send_run[kMaxRanks], send_run_end[kMaxRanks], receive_run[kMaxRanks], receive_run_end[kMaxRanks];  // of each rank
  int64_t input_row[kMaxRanks], send_rows[kMaxRanks];           // of a destination
  int64_t remote_row[kMaxRanks], remote_stride[kMaxRanks];      // its row that the first one goes to; bytes between its rows
  int64_t receive_row[kMaxRanks], receive_rows[kMaxRanks];      // of a source
  int32_t send_tile_rows[kMaxRanks], receive_tile_rows[kMaxRanks];
};

__device__ __forceinline__ uint32_t tiles_of(int64_t rows, int tile_rows) {
  return rows > 0 ? static_cast<uint32_t>((rows + tile_rows - 1) / tile_rows) : 1u;
}

// Every element divided in fp32.
template <class T>
__device__ __noinline__ void put_divided(char* to, int64_t to_stride, const char* from, int64_t from_stride, int rows, int width,
                                         float divisor) {
  auto divide = [divisor]<class Vector>(const Vector& v) {
    float x[Pack<T, Vector>::kCount];
    Pack<T, Vector>::unpack(v, x);
#pragma unroll
    for (int i = 0; i < Pack<T, Vector>::kCount; ++i) x[i] = __fdiv_rn(x[i], divisor);
    return Pack<T, Vector>::pack(x);
  };
  if (alignment_of(to, to_stride, from, from_stride, rows, width) >= 16)
    put_as<uint4>(to, to_stride, from, from_stride, rows, width, divide);
  else if constexpr (sizeof(T) == 4) put_as<unsigned int>(to, to_stride, from, from_stride, rows, width, divide);
  else put_as<unsigned short>(to, to_stride, from, from_stride, rows, width, divide);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) rows_kernel(const __grid_constant__ RowsParams p) {
  __shared__ Shared shared;
  Call call(p.call, &shared);
  const int rank = p.call.link.rank, slices = p.call.slices;
  char* const slot = call.my_slot();
  const bool copies_out = slot != p.call.output;
  auto sent = [&](int r, int slice, int of) { return slice_begin(p.send_rows[r], slice, of); };
  auto received = [&](int source, int slice) { return slice_begin(p.receive_rows[source], slice, slices); };
  auto put_rows = [&](char* to, int peer, int64_t first, int64_t end, uint32_t tile, uint32_t n) {
    first += static_cast<int64_t>(tile) * p.send_tile_rows[peer];
    const int rows = static_cast<int>(min(static_cast<int64_t>(n) * p.send_tile_rows[peer], end - first));
    for (int run = p.send_run[peer]; rows > 0 && run < p.send_run_end[peer]; ++run) {
      const Run r = p.send_runs[run];
      char* there = to + (p.remote_row[peer] + first) * p.remote_stride[peer] + r.to;
      const char* here = p.input + (p.input_row[peer] + first) * p.input_stride + r.from;
      if (p.divisor == 1.0f) put_slice(there, p.remote_stride[peer], here, p.input_stride, rows, static_cast<int>(r.width));
      else put_divided<T>(there, p.remote_stride[peer], here, p.input_stride, rows, static_cast<int>(r.width), p.divisor);
    }
  };
  call.run([&](int r, int slice, int of) { return tiles_of(sent(r, slice + 1, of) - sent(r, slice, of), p.send_tile_rows[r]); },
           [&](int source, int slice) {
             return copies_out ? tiles_of(received(source, slice + 1) - received(source, slice), p.receive_tile_rows[source]) : 1u;
           },
           copies_out,
           [&](char* to, int r, int slice, int of, uint32_t tile, uint32_t n) {
             put_rows(to, r, sent(r, slice, of), sent(r, slice + 1, of), tile, n);
           },
           [&](int source, int slice, uint32_t tile, uint32_t n) {
             const int64_t tile_rows = p.receive_tile_rows[source], first = received(source, slice) + tile * tile_rows;
             const int rows = static_cast<int>(min(n * tile_rows, received(source, slice + 1) - first));
             const int64_t stride = p.remote_stride[rank];
             for (int run = p.receive_run[source]; copies_out && rows > 0 && run < p.receive_run_end[source]; ++run) {
               const int64_t at = (p.receive_row[source] + first) * stride + p.receive_runs[run].to;
               put_slice(p.call.output + at, stride, slot + at, stride, rows, static_cast<int>(p.receive_runs[run].width));
             }
           });
}

}  // namespace fused_ops

using namespace fused_ops;

extern "C" {

int64_t fo_cuda_rows_params_bytes() { return sizeof(RowsParams); }
int fo_cuda_rows_warps() { return kThreads / 32; }

int fo_cuda_rows_load() {
  for (int dtype = 0; dtype < 3; ++dtype) {
    const int code = with_dtype(dtype, [](auto value) { return prepare(rows_kernel<decltype(value)>); });
    if (code) return code;
  }
  return 0;
}

int fo_cuda_rows(const RowsParams* p, int dtype, int blocks, void* stream) {
  return with_dtype(dtype, [&](auto value) {
    rows_kernel<decltype(value)><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*p);
    return static_cast<int>(cudaGetLastError());
  });
}

}  // extern "C"
