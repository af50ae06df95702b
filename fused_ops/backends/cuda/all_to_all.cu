// All-to-All by stores into the peers' memory. Tiles in claim order: post credits; slices for remote ranks, the next rank
// first; this rank's own slice; then one wait a source, which copies the slice out where the slot is not the output.
#include <cuda_runtime.h>

#include "cuda_call.cuh"

namespace fused_ops {

constexpr int64_t kTileBytes = 64 * 1024;
constexpr int kThreads = 512;

struct AllToAllParams {
  CallParams call;
  const char* input;
  int64_t send_offset[kMaxRanks], send_bytes[kMaxRanks];  // by destination, in input
  int64_t remote_offset[kMaxRanks];                       // by destination, in its output
  int64_t receive_offset[kMaxRanks], receive_bytes[kMaxRanks];  // by source, in output
};

__host__ __device__ inline uint32_t tiles(int64_t bytes) {
  return bytes <= 0 ? 1u : static_cast<uint32_t>((bytes + kTileBytes - 1) / kTileBytes);
}

__global__ void __launch_bounds__(kThreads) all_to_all_kernel(const __grid_constant__ AllToAllParams p) {
  __shared__ Shared shared;
  __shared__ uint32_t tiles_of[kMaxRanks];
  Call call(p.call, &shared);
  const Link& link = p.call.link;
  const int rank = link.rank, world = link.world;
  for (int r = threadIdx.x; r < world; r += blockDim.x) tiles_of[r] = tiles(p.send_bytes[r]);
  __syncthreads();

  char* const slot = link.locate(rank, call.my_place());
  const bool copies_out = slot != p.call.output;

  for (;;) {
    int64_t t = call.claim();
    if (t < 0) break;
    if (t == 0) {
      call.open();
      continue;
    }
    t -= 1;
    int peer = -1;
    for (int i = 1; i <= world; ++i) {
      const int r = (rank + i) % world;
      if (t < tiles_of[r]) { peer = r; break; }
      t -= tiles_of[r];
    }
    if (peer >= 0) {
      const int64_t at = t * kTileBytes;
      const int64_t bytes = min(kTileBytes, p.send_bytes[peer] - at);
      char* to = peer == rank ? p.call.output : call.destination(peer);
      if (to == nullptr) break;
      if (bytes > 0) put_slice(to + p.remote_offset[peer] + at, p.input + p.send_offset[peer] + at, bytes);
      call.tile_sent(peer, tiles_of[peer]);
      continue;
    }
    int source = -1;
    for (int i = 1; i < world; ++i) {
      const int r = (rank + i) % world;
      const uint32_t n = copies_out ? tiles(p.receive_bytes[r]) : 1u;
      if (t < n) { source = r; break; }
      t -= n;
    }
    if (source < 0) break;
    if (!call.wait_source(source)) break;
    if (copies_out && p.receive_bytes[source] > 0) {
      const int64_t at = p.receive_offset[source] + t * kTileBytes;
      put_slice(p.call.output + at, slot + at, min(kTileBytes, p.receive_bytes[source] - t * kTileBytes));
    }
  }
  call.close(tiles_of);
}

// This rank's part of a call that it rejected: its peers' waits end with the abort tag, and the epoch is used up.
__global__ void abort_kernel(const __grid_constant__ CallParams p) {
  __shared__ Shared shared;
  __shared__ uint32_t tiles_of[kMaxRanks];
  for (int r = threadIdx.x; r < kMaxRanks; r += blockDim.x) tiles_of[r] = 1;
  __syncthreads();
  Call(p, &shared).close(tiles_of);
}

}  // namespace fused_ops

extern "C" {

int64_t fo_cuda_all_to_all_tile_bytes() { return fused_ops::kTileBytes; }
int64_t fo_cuda_all_to_all_params_bytes() { return sizeof(fused_ops::AllToAllParams); }
int64_t fo_cuda_state_bytes() { return sizeof(fused_ops::State); }
int64_t fo_cuda_control_bytes() { return fused_ops::kMaxRanks * sizeof(fused_ops::PeerEntry); }

// Loads the kernel now, so that no lazy load has to wait behind a kernel that spins.
int fo_cuda_all_to_all_load() {
  cudaFuncAttributes attributes;
  const cudaError_t e = cudaFuncGetAttributes(&attributes, fused_ops::all_to_all_kernel);
  return static_cast<int>(e != cudaSuccess ? e : cudaFuncGetAttributes(&attributes, fused_ops::abort_kernel));
}

int fo_cuda_abort(const fused_ops::CallParams* p, void* stream) {
  fused_ops::abort_kernel<<<1, 64, 0, static_cast<cudaStream_t>(stream)>>>(*p);
  return static_cast<int>(cudaGetLastError());
}

int fo_cuda_all_to_all(const fused_ops::AllToAllParams* p, int blocks, void* stream) {
  fused_ops::all_to_all_kernel<<<blocks, fused_ops::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*p);
  return static_cast<int>(cudaGetLastError());
}

}  // extern "C"
