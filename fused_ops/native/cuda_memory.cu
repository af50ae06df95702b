// C interface for memory that other processes address: device memory shared by CUDA IPC, and pinned shared host memory.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kPartBytes = 2048;
struct Part {
  char bytes[kPartBytes];
};

__global__ void write_kernel(char* to, const __grid_constant__ Part part, int bytes) {
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = part.bytes[i];
}

}  // namespace

extern "C" {

// Host bytes to device memory as a kernel's arguments, in the order of the stream and without a host buffer that has to stay.
int fo_cuda_write(void* to, const void* from, int64_t bytes, void* stream) {
  for (int64_t at = 0; at < bytes; at += kPartBytes) {
    Part part;
    const int count = static_cast<int>(bytes - at < kPartBytes ? bytes - at : kPartBytes);
    memcpy(part.bytes, static_cast<const char*>(from) + at, static_cast<size_t>(count));
    write_kernel<<<1, 256, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<char*>(to) + at, part, count);
  }
  return static_cast<int>(cudaGetLastError());
}

int fo_cuda_ipc_handle_bytes() { return static_cast<int>(sizeof(cudaIpcMemHandle_t)); }

// Zeroed memory of the current device, and the handle by which another process opens it.
int fo_cuda_share(int64_t bytes, void** memory, void* handle) {
  cudaError_t e = cudaMalloc(memory, static_cast<size_t>(bytes));
  // Not the device's default stream: another channel's kernel may be waiting there for a peer.
  cudaStream_t stream = nullptr;
  if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (e == cudaSuccess) e = cudaMemsetAsync(*memory, 0, static_cast<size_t>(bytes), stream);
  if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
  if (stream) cudaStreamDestroy(stream);
  if (e == cudaSuccess) e = cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), *memory);
  return static_cast<int>(e);
}

// Maps another process's memory for kernels of the current device.
int fo_cuda_open(const void* handle, void** memory) {
  return static_cast<int>(
      cudaIpcOpenMemHandle(memory, *static_cast<const cudaIpcMemHandle_t*>(handle), cudaIpcMemLazyEnablePeerAccess));
}

int fo_cuda_close(void* memory) { return static_cast<int>(cudaIpcCloseMemHandle(memory)); }

// Also while some stream of the process captures a graph, which this has nothing to do with.
int fo_cuda_free(void* memory) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t e = cudaFree(memory);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return static_cast<int>(e);
}

// Registers host memory (mapped by several processes) with this process's device; returns its device address in *device.
int fo_cuda_pin(void* host, int64_t bytes, void** device) {
  cudaError_t e = cudaHostRegister(host, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (e != cudaSuccess) return static_cast<int>(e);
  return static_cast<int>(cudaHostGetDevicePointer(device, host, 0));
}

int fo_cuda_unpin(void* host) { return static_cast<int>(cudaHostUnregister(host)); }

const char* fo_cuda_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // extern "C"
