// Calls whose data are packets: 16 bytes, stored and loaded as one, that carry the epoch they belong to. A reader polls the
// packet itself, so that neither side waits for a fence, and each part of a result is there as soon as it has travelled.
//
// Packets live in memory that holds nothing but packets, two halves used in turn: a rank stores into a half again only in the
// call after next, which it reaches when every peer has ended this one. What was there before carries an older epoch. One
// layout per epoch is what every rank's announcement, {epoch, tag} where other calls have their first flag, makes sure of.
#pragma once

#include "cuda_call.cuh"

namespace fused_ops {

struct alignas(16) Packet {
  uint32_t data[3];
  uint32_t epoch;
};

// One 128-bit access, which is single-copy atomic from sm_70 on; a vector of four words would not be.
__device__ __forceinline__ Packet load_packet(const Packet* p) {
  uint64_t low, high;
  asm volatile("{ .reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }" : "=l"(low), "=l"(high) : "l"(p) : "memory");
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high)}, static_cast<uint32_t>(high >> 32)};
}

__device__ __forceinline__ void put_packet(Packet* p, const Packet& packet) {
  const uint64_t low = word(packet.data[1], packet.data[0]), high = word(packet.epoch, packet.data[2]);
  asm volatile("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.sys.global.b128 [%0], v; }" ::"l"(p), "l"(low), "l"(high) : "memory");
}

// A flag that nothing has to be visible before.
__device__ __forceinline__ void store_relaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

struct SharedPackets {
  Shared call;
  uint32_t given[2];
  int32_t failed, ends;
};

constexpr unsigned kMostBlocks = kMaxRanks * kMaxSlices;  // of a grid

// For whole blocks: every function but `wait_packets` is called by all threads of a block together.
//
// Parts are claimed, so that blocks that are resident do the work of those that are not. But answers from memory take a
// microsecond each: a block begins with the part of its own number and asks meanwhile whether it is the first to take it, and it
// asks for further parts ahead of use.
class PacketCall {
 public:
  const CallParams& p;
  const uint32_t epoch;

  __device__ PacketCall(const CallParams& params, SharedPackets* shared)
      : p(params), epoch(*reinterpret_cast<volatile uint32_t*>(&params.state->epoch) + 1), shared_(shared),
        is_broken_(*reinterpret_cast<volatile int32_t*>(&params.state->stop)) {
    if (static_cast<int>(threadIdx.x) < p.link.world - 1) announced_ = p.link.inbox(peer_of(threadIdx.x))->flag(epoch, 0);
    if (threadIdx.x == 0) shared->failed = is_broken_;  // what others add to it lies behind a barrier
  }

  // Thread 0 takes the part of its block's number; the block has it where `was_first` of what this gives.
  __device__ uint32_t take_own() {
    if (threadIdx.x != 0) return epoch;
    atomicAdd(blocks_begun(), 1u);
    return atomicExch(&p.state->watching[blockIdx.x], epoch);
  }
  __device__ bool was_first(uint32_t before) const { return before != epoch; }

  // Thread 0 is given the next part of a queue.
  __device__ uint32_t ask(Queue queue) { return threadIdx.x == 0 ? atomicAdd(&p.state->next_tile[queue], 1u) : kNone; }

  // For thread 0, ahead of `left_behind`: how many blocks have begun.
  __device__ uint32_t begun() { return threadIdx.x == 0 ? *reinterpret_cast<volatile uint32_t*>(blocks_begun()) : 0u; }

  // Thread 0 is given a part whose block has not begun yet, or kNone.
  __device__ uint32_t left_behind(uint32_t begun) {
    if (threadIdx.x >= 32 || __shfl_sync(kAllLanes, begun, 0) == gridDim.x) return kNone;
    for (uint32_t first = 0; first < gridDim.x; first += 32) {
      const uint32_t block = first + threadIdx.x;
      const bool is_free = block < gridDim.x && *reinterpret_cast<volatile uint32_t*>(&p.state->watching[block]) != epoch;
      for (unsigned free = __ballot_sync(kAllLanes, is_free); free; free &= free - 1) {
        const uint32_t part = first + __ffs(static_cast<int>(free)) - 1;
        const uint32_t before = threadIdx.x == 0 ? atomicExch(&p.state->watching[part], epoch) : epoch;
        if (was_first(__shfl_sync(kAllLanes, before, 0))) return part;
      }
    }
    return kNone;
  }

  // What thread 0 was given, for every thread; kNone past the last of `count` parts, and on a channel that is broken.
  __device__ uint32_t everyone(uint32_t given, uint32_t count) {
    uint32_t& place = shared_->given[turn_ ^= 1];  // in turn, so that one barrier does
    if (threadIdx.x == 0) place = given < count && !is_broken_ ? given : uint32_t{kNone};
    __syncthreads();
    return place;
  }

  // Tells the peers what layout this rank's packets of this epoch have, by the flag of its only slice, which also says that it
  // is not late, should their call fail. (Packets that come after that do no harm: nothing else ever lies where they go.) And
  // where a credit would be, for peers that are at another operator and would wait for one.
  __device__ void announce() {
    for (int k = threadIdx.x; k < p.link.world - 1; k += blockDim.x) {
      const int peer = peer_of(k);
      delay(peer);
      store_relaxed(&p.link.outbox(peer)->credit_tag, word(epoch, p.tag));
      if (!stopped()) store_relaxed(p.link.outbox(peer)->flag(epoch, 0), word(epoch, p.tag));
    }
  }

  // What this thread's peer has announced, if it has: ahead of `check_announcement`.
  __device__ uint64_t announced() const { return announced_ ? load_relaxed(announced_) : 0; }

  // The call fails where a peer's packets are not laid out as this rank's are. What the peer said lasts until its call after
  // next, which it cannot end before this rank has ended this one; it may well be ahead by one.
  __device__ void check_announcement(uint64_t found) {
    if (!announced_) return;
    const int peer = peer_of(threadIdx.x);
    Patience patience(*this, kCredit, peer);
    for (;; found = announced()) {
      const auto tag = static_cast<uint32_t>(found);
      if (static_cast<uint32_t>(found >> 32) == epoch) {
        if (tag >= kAbortTag) fail(kRejected, kCredit, culprit_of(tag));
        else if (tag != p.tag) fail(kBadTag, kCredit, peer);
        return;
      }
      if (patience.ends()) return;
    }
  }

  // kCount packets, for one thread; all are asked for at once. False when the call has failed. `source_of(i)`: whose packet.
  template <int kCount, class SourceOf>
  __device__ __forceinline__ bool wait_packets(const Packet* const (&from)[kCount], Packet (&got)[kCount], SourceOf&& source_of) {
    Patience patience(*this, kData, -1);
    for (;;) {
      int missing = -1;
#pragma unroll
      for (int i = 0; i < kCount; ++i) got[i] = load_packet(from[i]);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (got[i].epoch != epoch) missing = i;
      if (missing < 0) return true;
      patience.peer = source_of(missing);
      if (patience.ends()) return false;
    }
  }

  // A random while, in stress tests.
  __device__ void delay(int peer) const {
    if (p.stress_delay_us == 0) return;
    uint32_t h = (epoch * 2654435761u) ^ (peer * 40503u + p.link.rank * 9973u + blockIdx.x * 7919u);
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    const uint64_t until = now_ns() + 1000ull * (h % p.stress_delay_us);
    while (now_ns() < until) __nanosleep(200);
  }

  // This block has sent all it has to send.
  __device__ void work_done() {
    if (threadIdx.x == 0)
      atomicMax(reinterpret_cast<unsigned long long*>(&p.state->work_done_ns), static_cast<unsigned long long>(now_ns()));
  }

  // Every block's last act. The last block to come here ends the call. The kernel's end is the only fence that a call needs
  // that went well; a failed one is closed as any other, by that block.
  __device__ void close() {
    constexpr uint32_t kFailed = 1u << 16;  // beside the count of blocks
    State* s = p.state;
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint64_t work_done = *reinterpret_cast<volatile uint64_t*>(&s->work_done_ns), waited = s->wait_ns;  // at once with the count
      const uint32_t mine = 1 + (shared_->failed ? kFailed : 0), count = atomicAdd(&s->blocks_done, mine) + mine;
      shared_->ends = count % kFailed == gridDim.x && count >= kFailed;
      if (count == gridDim.x) {
        const uint64_t whole = waited + (work_done ? now_ns() - work_done : 0);
        s->work_done_ns = 0;
        s->wait_ns = whole;
        *reinterpret_cast<volatile uint64_t*>(&p.record->wait_ns) = whole;
        for (int q = 0; q < kQueues; ++q) s->next_tile[q] = 0;
        *blocks_begun() = 0;
        s->blocks_done = 0;
        s->epoch = epoch;
      } else if (shared_->ends) {
        atomicExch(&s->blocks_done, gridDim.x - 1);
        __threadfence();
      }
    }
    __syncthreads();
    if (shared_->ends) Call(p, &shared_->call).reject();
  }

 private:
  SharedPackets* const shared_;
  const bool is_broken_;
  const uint64_t* announced_ = nullptr;  // where this thread's peer announces
  int turn_ = 0;

  __device__ bool stopped() const { return *reinterpret_cast<volatile int32_t*>(&p.state->stop); }

  // Of one thread that polls: how often, and until when.
  struct Patience {
    PacketCall& call;
    const int phase;
    int peer, polls = 0;
    uint64_t end = 0;

    __device__ Patience(PacketCall& c, int what, int who) : call(c), phase(what), peer(who) {}

    // After a look in vain: waits a little. True when there is nothing more to wait for, which is then known to all.
    __device__ bool ends() {
      ++polls;
      if (polls > 8) __nanosleep(polls < 64 ? 32 : 256);
      if (polls % 8 != 0) return false;
      if (call.stopped()) return call.fail(kOk, phase, peer);
      const uint64_t flag = load_relaxed(call.p.link.inbox(peer)->flag(call.epoch, 0));
      if (peer != call.p.link.rank && static_cast<uint32_t>(flag >> 32) == call.epoch && static_cast<uint32_t>(flag) >= kAbortTag)
        return call.fail(kRejected, phase, culprit_of(static_cast<uint32_t>(flag)));
      const uint64_t now = now_ns();
      if (end == 0) end = now + static_cast<uint64_t>(call.p.state->timeout_ns);
      return now > end && call.fail(kTimeout, phase, peer);
    }
  };

  // kOk: another thread has said why.
  __device__ bool fail(int code, int phase, int peer) {
    shared_->failed = 1;
    fail_call(p.state, code, phase, peer);
    return true;
  }

  // The count of tiles done of this rank for itself, which other calls have no use for.
  __device__ uint32_t* blocks_begun() const { return &p.state->tiles_done[p.link.rank * kMaxSlices]; }

  __device__ int peer_of(int k) const { return (p.link.rank + 1 + k % (p.link.world - 1)) % p.link.world; }
};

}  // namespace fused_ops
