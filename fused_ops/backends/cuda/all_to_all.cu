// All-to-All by stores into the peers' memory.
#include <cuda_runtime.h>

#include "cuda_call.cuh"

namespace fused_ops {

constexpr int64_t kTileBytes = 16 * 1024;
constexpr int kThreads = 512;  // of the one block that a call has on an SM

struct AllToAllParams {
  CallParams call;
  const char* input;
  int64_t send_offset[kMaxRanks], send_bytes[kMaxRanks];  // by destination, in input
  int64_t remote_offset[kMaxRanks];                       // by destination, in its output
  int64_t receive_offset[kMaxRanks], receive_bytes[kMaxRanks];  // by source, in output
};

// A slice is a whole number of tiles, the last one excepted.
struct Slice {
  int64_t first_tile, end_tile;
  __device__ Slice(int64_t bytes, int slice, int slices) {
    const int64_t tiles = (bytes + kTileBytes - 1) / kTileBytes;
    first_tile = slice_begin(tiles, slice, slices);
    end_tile = slice_begin(tiles, slice + 1, slices);
  }
  __device__ uint32_t tiles() const { return max(static_cast<uint32_t>(end_tile - first_tile), 1u); }
};

__device__ __forceinline__ void copy_tiles(char* to, const char* from, int64_t bytes, int64_t tile, uint32_t n) {
  const int64_t at = tile * kTileBytes;
  if (at < bytes) put_slice(to + at, from + at, static_cast<int>(min(n * kTileBytes, bytes - at)));
}

__global__ void __launch_bounds__(kThreads, 1) all_to_all_kernel(const __grid_constant__ AllToAllParams p) {
  __shared__ Shared shared;
  Call call(p.call, &shared);
  const int slices = p.call.slices;
  char* const slot = call.my_slot();
  const bool copies_out = slot != p.call.output;
  call.run([&](int r, int slice, int of) { return Slice(p.send_bytes[r], slice, of).tiles(); },
           [&](int source, int slice) { return copies_out ? Slice(p.receive_bytes[source], slice, slices).tiles() : 1u; }, copies_out,
           [&](char* to, int r, int slice, int of, uint32_t tile, uint32_t n) {
             const Slice part(p.send_bytes[r], slice, of);
             if (part.first_tile + tile < part.end_tile)
               copy_tiles(to + p.remote_offset[r], p.input + p.send_offset[r], p.send_bytes[r], part.first_tile + tile, n);
           },
           [&](int source, int slice, uint32_t tile, uint32_t n) {
             const Slice part(p.receive_bytes[source], slice, slices);
             const int64_t at = p.receive_offset[source];
             if (copies_out && part.first_tile + tile < part.end_tile)
               copy_tiles(p.call.output + at, slot + at, p.receive_bytes[source], part.first_tile + tile, n);
           });
}

__global__ void reject_kernel(const __grid_constant__ CallParams p) {
  __shared__ Shared shared;
  Call(p, &shared).reject();
}

}  // namespace fused_ops

extern "C" {

int64_t fo_cuda_all_to_all_tile_bytes() { return fused_ops::kTileBytes; }
int64_t fo_cuda_all_to_all_params_bytes() { return sizeof(fused_ops::AllToAllParams); }
int fo_cuda_all_to_all_warps() { return fused_ops::kThreads / 32; }
int64_t fo_cuda_record_bytes() { return sizeof(fused_ops::Record); }
int64_t fo_cuda_call_params_bytes() { return sizeof(fused_ops::CallParams); }
int64_t fo_cuda_state_bytes() { return sizeof(fused_ops::State); }
int64_t fo_cuda_control_bytes() { return fused_ops::kMaxRanks * sizeof(fused_ops::PeerEntry); }
int64_t fo_cuda_halted_offset() { return offsetof(fused_ops::State, halted); }
int64_t fo_cuda_timeout_offset() { return offsetof(fused_ops::State, timeout_ns); }

int fo_cuda_all_to_all_load() {
  const int code = fused_ops::prepare(fused_ops::all_to_all_kernel);
  return code ? code : fused_ops::prepare(fused_ops::reject_kernel);
}

int fo_cuda_reject(const fused_ops::CallParams* p, void* stream) {
  fused_ops::reject_kernel<<<1, 64, 0, static_cast<cudaStream_t>(stream)>>>(*p);
  return static_cast<int>(cudaGetLastError());
}

int fo_cuda_all_to_all(const fused_ops::AllToAllParams* p, int blocks, void* stream) {
  fused_ops::all_to_all_kernel<<<blocks, fused_ops::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*p);
  return static_cast<int>(cudaGetLastError());
}

}  // extern "C"
