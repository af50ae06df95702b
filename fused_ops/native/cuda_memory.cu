// C interface for memory that torch does not hand out: pinning a shared host segment, and error texts.
#include <cuda_runtime.h>

#include <cstdint>

extern "C" {

// Registers host memory (mapped by several processes) with this process's device; returns its device address in *device.
int fo_cuda_pin(void* host, int64_t bytes, void** device) {
  cudaError_t e = cudaHostRegister(host, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (e != cudaSuccess) return static_cast<int>(e);
  return static_cast<int>(cudaHostGetDevicePointer(device, host, 0));
}

int fo_cuda_unpin(void* host) { return static_cast<int>(cudaHostUnregister(host)); }

const char* fo_cuda_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // extern "C"
