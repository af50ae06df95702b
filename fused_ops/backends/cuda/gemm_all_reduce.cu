// Product of a few rows with a weight whose inner dimension is spread over ranks, and the sum over them, in one kernel: a
// tile's partial sums leave in packets as soon as they are there, for the rank that adds them up (two phases; its sums then go
// to everybody) or for all ranks (one phase).
#include <cuda_runtime.h>

#include "cuda_gemv.cuh"
#include "cuda_packets.cuh"

namespace fused_ops {

constexpr int kSharedBytes = 88 * 1024;  // of a block, beside SharedPackets: two blocks of 100 KB have no room on an SM of Hopper's

// Which columns of the output each rank adds up: as even as whole ones allow.
struct Owners {
  int64_t least, longer;  // columns of a rank; ranks that have one more

  __device__ int64_t first(int r) const { return r * least + min(static_cast<int64_t>(r), longer); }
  __device__ int of(int64_t n) const {
    const int64_t behind = longer * (least + 1);
    return static_cast<int>(n < behind ? n / (least + 1) : longer + (n - behind) / max(least, int64_t{1}));
  }
};

struct GemmParams {
  CallParams call;
  char* packets[kMaxRanks];  // every rank's memory for packets
  int64_t half_bytes;        // of which each epoch uses one half, whatever its shape: the one before may be under way,
  int64_t sums_offset;       // partial sums [world][packets a column][span] first, then sums [packets a column][columns]
  const char *input, *bias;  // input: [rows, inner], no gaps; bias: [columns], or null
  Weights weight;
  int64_t columns, span;     // n; of which a rank adds up at most `span`,
  int64_t first, size;       // this rank `size` from `first` on
  Owners owners;             // in two phases
  TileShape shape;
  int32_t rows, one_phase, tiles, first_tile, units;
  int32_t partials, sums;    // packets of each kind that a column has
};

template <class T>
class Reduction {
 public:
  static constexpr int kFloats = 3;                    // of a packet of partial sums
  static constexpr int kSums = 12 / sizeof(T);         // of a packet of sums
  static constexpr int kPackets = kSums / kFloats;     // of partial sums that a packet of sums takes
  static constexpr int kSources = 4;                   // whose packets a thread asks for at once
  static constexpr int kGathered = 4;                  // packets of sums that it asks for at once

  __device__ Reduction(const GemmParams& params, PacketCall* call) : p_(params), call_(*call) {}

  // Sends a tile's partial sums: parts [k_groups][rows][sum_stride] in shared memory, added up here.
  __device__ void send(const float* parts, int64_t first, int columns) {
    const TileShape& s = p_.shape;
    const int count = p_.partials * columns;
    call_.delay(static_cast<int>(first));
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const int k = i / columns, column = i - k * columns;
      Packet packet{{}, call_.epoch};
#pragma unroll
      for (int e = 0; e < kFloats; ++e) {
        const int m = kFloats * k + e;
        float sum = 0.0f;
        if (m < p_.rows)
          for (int part = 0; part < s.k_groups; ++part) sum += parts[(static_cast<int64_t>(part) * p_.rows + m) * s.sum_stride + column];
        packet.data[e] = __float_as_uint(sum);
      }
      const int64_t n = first + column;
      if (p_.one_phase) {
        for (int r = 1; r <= world(); ++r) put_packet(partial((rank() + r) % world(), rank(), k, n), packet);
      } else {
        const int owner = p_.owners.of(n);
        put_packet(partial(owner, rank(), k, n - p_.owners.first(owner)), packet);
      }
    }
  }

  // Adds up part `unit` of what this rank adds up, in rank order, and hands it out.
  __device__ void reduce(uint32_t unit) {
    const int64_t items = p_.sums * p_.size, begin = slice_begin(items, unit, p_.units), end = slice_begin(items, unit + 1, p_.units);
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
      const int q = static_cast<int>(i / p_.size);
      const int64_t column = i - q * p_.size, n = p_.first + column;
      float sum[kSums] = {};
      for (int base = 0; base < world(); base += kSources) {
        const Packet* from[kSources * kPackets];
        Packet got[kSources * kPackets];
#pragma unroll
        for (int k = 0; k < kSources * kPackets; ++k)
          from[k] = partial(rank(), min(base + k / kPackets, world() - 1), min(q * kPackets + k % kPackets, p_.partials - 1), column);
        if (!call_.wait_packets(from, got, [&](int k) { return min(base + k / kPackets, world() - 1); })) return;
#pragma unroll
        for (int k = 0; k < kSources * kPackets; ++k)
          if (base + k / kPackets < world())
#pragma unroll
            for (int e = 0; e < kFloats; ++e) sum[k % kPackets * kFloats + e] += __uint_as_float(got[k].data[e]);
      }
      const float bias = p_.bias ? to_float(reinterpret_cast<const T*>(p_.bias)[n]) : 0.0f;
      T rounded[kSums];
#pragma unroll
      for (int e = 0; e < kSums; ++e) rounded[e] = from_float<T>(p_.bias ? sum[e] + bias : sum[e]);
      Packet packet{{}, call_.epoch};
      memcpy(packet.data, rounded, sizeof packet.data);
      if (!p_.one_phase)
        for (int r = 1; r < world(); ++r) put_packet(sum_packet((rank() + r) % world(), q, n), packet);
      deliver(packet, q, n);
    }
  }

  // Delivers part `unit` of what the others have added up.
  __device__ void gather(uint32_t unit) {
    const int64_t others = p_.columns - p_.size, items = p_.sums * others;
    const int64_t begin = slice_begin(items, unit, p_.units), end = slice_begin(items, unit + 1, p_.units);
    for (int64_t i = begin + threadIdx.x; i < end; i += kGathered * blockDim.x) {
      const Packet* from[kGathered];
      Packet got[kGathered];
      int q[kGathered];
      int64_t n[kGathered];
#pragma unroll
      for (int k = 0; k < kGathered; ++k) {
        const int64_t item = i + k * blockDim.x < end ? i + k * blockDim.x : i;
        q[k] = static_cast<int>(item / others);
        const int64_t other = item - q[k] * others;
        n[k] = other < p_.first ? other : other + p_.size;
        from[k] = sum_packet(rank(), q[k], n[k]);
      }
      if (!call_.wait_packets(from, got, [&](int k) {
            int64_t column = n[0];
#pragma unroll
            for (int other = 1; other < kGathered; ++other) column = other == k ? n[other] : column;
            return p_.owners.of(column);
          }))
        return;
#pragma unroll
      for (int k = 0; k < kGathered; ++k)
        if (i + k * blockDim.x < end) deliver(got[k], q[k], n[k]);
    }
  }

 private:
  const GemmParams& p_;
  PacketCall& call_;

  __device__ int rank() const { return p_.call.link.rank; }
  __device__ int world() const { return p_.call.link.world; }
  __device__ Packet* half(int r) const { return reinterpret_cast<Packet*>(p_.packets[r] + (call_.epoch & 1) * p_.half_bytes); }
  __device__ Packet* partial(int owner, int source, int k, int64_t column) const {
    return half(owner) + (static_cast<int64_t>(source) * p_.partials + k) * p_.span + column;
  }
  __device__ Packet* sum_packet(int r, int q, int64_t n) const {
    return half(r) + p_.sums_offset / static_cast<int64_t>(sizeof(Packet)) + q * p_.columns + n;
  }

  __device__ __forceinline__ void deliver(const Packet& packet, int q, int64_t n) const {
    T values[kSums];
    memcpy(values, packet.data, sizeof values);
    T* output = reinterpret_cast<T*>(p_.call.output);
#pragma unroll
    for (int e = 0; e < kSums; ++e)
      if (kSums * q + e < p_.rows) output[(static_cast<int64_t>(kSums) * q + e) * p_.columns + n] = values[e];
  }
};

template <class T, WeightLayout kLayout, int kMostInputs>
__global__ void __launch_bounds__((WarpProduct<T, kLayout, kMostInputs>::kMaxThreads), 1)
    gemm_all_reduce_kernel(const __grid_constant__ GemmParams p) {
  using Product = WarpProduct<T, kLayout, kMostInputs>;
  __shared__ SharedPackets shared;
  extern __shared__ uint4 dynamic[];
  char* const memory = reinterpret_cast<char*>(dynamic);
  PacketCall call(p.call, &shared);
  Reduction<T> reduction(p, &call);
  const TileShape& s = p.shape;
  const auto tiles = static_cast<uint32_t>(p.tiles), units = static_cast<uint32_t>(p.units);
  uint32_t before = ~call.epoch, next = 0, unit = 0, gathered = 0;  // given to thread 0
  uint64_t announced = 0;

  for (uint32_t tile = blockIdx.x, is_first = true; tile != kNone; is_first = false) {
    const int64_t first = (tile + p.first_tile) % tiles * static_cast<int64_t>(s.rows);
    const int columns = static_cast<int>(min(static_cast<int64_t>(s.rows), p.columns - first));
    multiply_rows<Product, T>(memory, s, p.weight, p.input, p.rows, first, columns, [&] {
      if (is_first) {
        before = call.take_own();
        unit = call.ask(kLocal);
        if (!p.one_phase) gathered = call.ask(kReceives);
      } else {
        before = ~call.epoch;
      }
      next = call.ask(kSends);
      if (tile == 0) call.announce();
    });
    const uint32_t begun = call.begun();  // asked for here, looked at below
    announced = call.announced();
    if (call.everyone(call.was_first(before) ? tile : kNone, tiles) != kNone) reduction.send(reinterpret_cast<const float*>(memory), first, columns);
    next += gridDim.x;
    if (__shfl_sync(kAllLanes, next, 0) >= tiles) next = call.left_behind(begun);
    tile = call.everyone(next, tiles);  // a barrier, before whose end nobody stages the next tile's input
  }
  call.work_done();
  call.check_announcement(announced);
  for (uint32_t mine; (mine = call.everyone(unit, units)) != kNone;) {
    unit = call.ask(kLocal);
    reduction.reduce(mine);
  }
  for (uint32_t mine; !p.one_phase && (mine = call.everyone(gathered, units)) != kNone;) {
    gathered = call.ask(kReceives);
    reduction.gather(mine);
  }
  call.close();
}

// Calls f(Product(), T(), kernel) for the kernel of a dtype, a layout and so many rows.
template <class F>
int with_kernel(int dtype, int layout, int rows, F&& f) {
  return with_dtype(dtype, [&](auto value) {
    using T = decltype(value);
    constexpr bool kIsFloat = sizeof(T) == 4;
    auto with = [&]<WeightLayout kLayout, int kInputs>() {
      return f(WarpProduct<T, kLayout, kInputs>(), gemm_all_reduce_kernel<T, kLayout, kInputs>);
    };
    auto by_rows = [&]<WeightLayout kLayout>() {
      if (rows <= 8) return with.template operator()<kLayout, 8>();
      if (rows <= 16 || kIsFloat) return with.template operator()<kLayout, 16>();
      if (rows <= 32) return with.template operator()<kLayout, kIsFloat ? 16 : 32>();
      return with.template operator()<kLayout, kIsFloat ? 16 : 64>();
    };
    switch (static_cast<WeightLayout>(layout)) {
      case WeightLayout::kByRows: return by_rows.template operator()<WeightLayout::kByRows>();
      case WeightLayout::kByColumns: return by_rows.template operator()<WeightLayout::kByColumns>();
      default: return with.template operator()<WeightLayout::kAnyStrides, kIsFloat ? 16 : 64>();
    }
  });
}

}  // namespace fused_ops

using namespace fused_ops;

extern "C" {

int64_t fo_cuda_gemm_params_bytes() { return sizeof(GemmParams); }

// What a kernel can do: {rows of the weight a warp, rows of the input a warp, chunks a round, most threads, bytes of shared memory}.
int fo_cuda_gemm_limits(int dtype, int layout, int rows, int32_t* limits) {
  return with_kernel(dtype, layout, rows, [&](auto product, auto*) {
    using Product = decltype(product);
    limits[0] = Product::kRows, limits[1] = Product::kInputs, limits[2] = Product::kDepth, limits[3] = Product::kMaxThreads;
    limits[4] = kSharedBytes;
    return 0;
  });
}

int fo_cuda_gemm_all_reduce_load() {
  for (int dtype = 0; dtype < 3; ++dtype)
    for (int layout = 0; layout < 3; ++layout)
      for (int rows = 8; rows <= 64; rows *= 2) {
        const int code = with_kernel(dtype, layout, rows, [&](auto, auto* kernel) {
          const int failed = prepare(kernel);
          if (failed) return failed;
          return static_cast<int>(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
        });
        if (code) return code;
      }
  return 0;
}

int fo_cuda_gemm_all_reduce(const GemmParams* p, int dtype, int layout, int blocks, int threads, int shared_bytes, void* stream) {
  return with_kernel(dtype, layout, p->rows, [&](auto, auto* kernel) {
    kernel<<<blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(*p);
    return static_cast<int>(cudaGetLastError());
  });
}

}  // extern "C"
