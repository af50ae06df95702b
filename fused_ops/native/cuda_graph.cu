// C interface for the captures of CUDA graphs: which one a stream is in, and whether anybody can still replay it.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace {

// Owned by two: by the graph with its executable copies, and by whoever watches them.
struct Watch {
  std::atomic<int> owners{2};
  std::atomic<int> over{0};
};

void let_go(Watch* watch) {
  if (watch->owners.fetch_sub(1) == 1) delete watch;
}

void graph_is_gone(void* watch) {
  static_cast<Watch*>(watch)->over.store(1);
  let_go(static_cast<Watch*>(watch));
}

cudaError_t capture_info(cudaStream_t stream, unsigned long long* number, cudaGraph_t* graph) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
  const cudaError_t e = cudaStreamGetCaptureInfo(stream, &status, number, graph, nullptr, nullptr, nullptr);
#else
  const cudaError_t e = cudaStreamGetCaptureInfo_v2(stream, &status, number, graph, nullptr, nullptr);
#endif
  if (e == cudaSuccess && status != cudaStreamCaptureStatusActive) return cudaErrorStreamCaptureInvalidated;
  return e;
}

}  // namespace

extern "C" {

// The number of the capture that the stream is in: no two of a process have the same.
int fo_cuda_capture_number(void* stream, uint64_t* number) {
  unsigned long long found = 0;
  cudaGraph_t graph = nullptr;
  const cudaError_t e = capture_info(static_cast<cudaStream_t>(stream), &found, &graph);
  *number = found;
  return static_cast<int>(e);
}

// Watches the graph that the stream is capturing, and all that is instantiated from it.
int fo_cuda_watch_capture(void* stream, void** watch) {
  unsigned long long number = 0;
  cudaGraph_t graph = nullptr;
  cudaError_t e = capture_info(static_cast<cudaStream_t>(stream), &number, &graph);
  if (e != cudaSuccess) return static_cast<int>(e);
  auto* made = new Watch;
  cudaUserObject_t object = nullptr;
  e = cudaUserObjectCreate(&object, made, graph_is_gone, 1, cudaUserObjectNoDestructorSync);
  if (e != cudaSuccess) {
    delete made;
    return static_cast<int>(e);
  }
  e = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (e != cudaSuccess) {
    cudaUserObjectRelease(object, 1);
    let_go(made);
    return static_cast<int>(e);
  }
  *watch = made;
  return 0;
}

int fo_cuda_capture_over(const void* watch) { return static_cast<const Watch*>(watch)->over.load(); }

void fo_cuda_end_watch(void* watch) { let_go(static_cast<Watch*>(watch)); }

}  // extern "C"
