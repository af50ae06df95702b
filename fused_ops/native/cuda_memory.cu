// C interface for memory that other processes address: device memory shared by CUDA IPC, and pinned shared host memory.
#include <cuda_runtime.h>

#include <cstdint>

extern "C" {

int fo_cuda_ipc_handle_bytes() { return static_cast<int>(sizeof(cudaIpcMemHandle_t)); }

// Zeroed memory of the current device, and the handle by which another process opens it.
int fo_cuda_share(int64_t bytes, void** memory, void* handle) {
  cudaError_t e = cudaMalloc(memory, static_cast<size_t>(bytes));
  if (e == cudaSuccess) e = cudaMemset(*memory, 0, static_cast<size_t>(bytes));
  if (e == cudaSuccess) e = cudaDeviceSynchronize();
  if (e == cudaSuccess) e = cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), *memory);
  return static_cast<int>(e);
}

// Maps another process's memory for kernels of the current device.
int fo_cuda_open(const void* handle, void** memory) {
  return static_cast<int>(
      cudaIpcOpenMemHandle(memory, *static_cast<const cudaIpcMemHandle_t*>(handle), cudaIpcMemLazyEnablePeerAccess));
}

int fo_cuda_close(void* memory) { return static_cast<int>(cudaIpcCloseMemHandle(memory)); }

int fo_cuda_free(void* memory) { return static_cast<int>(cudaFree(memory)); }

// Registers host memory (mapped by several processes) with this process's device; returns its device address in *device.
int fo_cuda_pin(void* host, int64_t bytes, void** device) {
  cudaError_t e = cudaHostRegister(host, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (e != cudaSuccess) return static_cast<int>(e);
  return static_cast<int>(cudaHostGetDevicePointer(device, host, 0));
}

int fo_cuda_unpin(void* host) { return static_cast<int>(cudaHostUnregister(host)); }

const char* fo_cuda_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // extern "C"
