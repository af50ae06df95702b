// The lookups in order of their row: words {row among all tables' rows, bag or position}, sorted by row, stably.
#include <cuda_runtime.h>

#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "cuda_lookup.cuh"

namespace fused_ops {

constexpr int kThreads = 256;

// `lanes` lanes a bag write its words, and where positions are wanted (per-sample weights) each lookup's bag.
template <class Index>
__global__ void entries_kernel(const __grid_constant__ Lookups l, int shift, int lanes, uint64_t* entries, int32_t* bag_of) {
  const int64_t bags = l.num_features * l.batch, step = static_cast<int64_t>(gridDim.x) * blockDim.x / lanes;
  const auto* offsets = static_cast<const Index*>(l.offsets);
  const auto* indices = static_cast<const Index*>(l.indices);
  for (int64_t bag = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / lanes; bag < bags; bag += step) {
    const Feature& f = l.features[bag / l.batch];
    const int64_t first = max(static_cast<int64_t>(offsets[bag]), int64_t{0}), end = min(static_cast<int64_t>(offsets[bag + 1]), l.nnz);
    for (int64_t i = first + threadIdx.x % lanes; i < end; i += lanes) {
      const int64_t row = f.first_row + max(valid_row(indices[i], f.rows, l.policy), int64_t{0});
      if (entries) entries[i] = (static_cast<uint64_t>(row) << shift) | static_cast<uint64_t>(bag_of ? i : bag);
      if (bag_of) bag_of[i] = static_cast<int32_t>(bag);
    }
  }
}

}  // namespace fused_ops

using namespace fused_ops;

extern "C" {

// Scratch that sorting `count` words needs.
int fo_cuda_sort_bytes(int64_t count, int first_bit, int end_bit, int64_t* bytes) {
  size_t needed = 0;
  const uint64_t* in = nullptr;
  uint64_t* out = nullptr;
  const cudaError_t e = cub::DeviceRadixSort::SortKeys(nullptr, needed, in, out, count, first_bit, end_bit);
  *bytes = static_cast<int64_t>(needed);
  return static_cast<int>(e);
}

int fo_cuda_sort_words(const uint64_t* unsorted, uint64_t* sorted, int64_t count, int first_bit, int end_bit, void* scratch,
                       int64_t scratch_bytes, void* stream) {
  size_t bytes = static_cast<size_t>(scratch_bytes);
  auto* s = static_cast<cudaStream_t>(stream);
  return static_cast<int>(cub::DeviceRadixSort::SortKeys(scratch, bytes, unsorted, sorted, count, first_bit, end_bit, s));
}

// The lookups' words, unsorted; and where bag_of is not null each lookup's bag, whose words then hold positions.
int fo_cuda_entries(const Lookups* l, int index_bytes, int shift, int lanes, uint64_t* entries, int32_t* bag_of, void* stream) {
  const int64_t groups = l->num_features * l->batch * lanes;
  const auto blocks = static_cast<unsigned>(std::min((groups + kThreads - 1) / kThreads, int64_t{4096}));
  auto* s = static_cast<cudaStream_t>(stream);
  if (blocks == 0 || l->nnz == 0) return 0;
  if (index_bytes == 4) entries_kernel<int32_t><<<blocks, kThreads, 0, s>>>(*l, shift, lanes, entries, bag_of);
  else entries_kernel<int64_t><<<blocks, kThreads, 0, s>>>(*l, shift, lanes, entries, bag_of);
  return static_cast<int>(cudaGetLastError());
}

int fo_cuda_entries_load() {
  const int failed = load(entries_kernel<int32_t>);
  return failed ? failed : load(entries_kernel<int64_t>);
}

}  // extern "C"
