// One call on a CUDA channel, as the blocks of a kernel live it: claim tiles, find destinations, signal slices, wait for
// sources, close. The state is in device memory, so that a replayed graph is a new epoch; failures leave a record in pinned
// memory, poison the output and return.
#pragma once

#include "cuda_link.cuh"

namespace fused_ops {

enum Code : int32_t { kOk = 0, kTimeout = 1, kRejected = 3, kBroken = 4, kBadTag = 8 };
enum Phase : int32_t { kCredit = 2, kData = 3 };

struct State {
  uint32_t epoch;        // of the last finished call
  uint32_t next_tile, blocks_done, slices_sent;
  uint32_t posted_epoch, posted_tag, posted_place;  // the credit posted ahead
  uint32_t opened;       // epoch whose credits are posted
  int32_t failed, failed_phase, failed_peer;        // of the running call
  int32_t broken;        // a timeout happened: no later call can work
  uint64_t sends_done_ns, wait_ns;
  uint32_t tiles_done[kMaxRanks];
};

// In pinned host memory. The host clears `serial` when it has read a record; the device writes one only when it is clear.
struct Record {
  int64_t timeout_ns;
  uint64_t wait_ns;      // total time that calls waited beyond their own sends
  uint32_t serial;
  int32_t code, phase, peer;
  uint32_t epoch, operator_id;
  uint64_t late;         // bit r: rank r's flag had not arrived
  int64_t call_number;   // the host's count, to find what the peer said of it
};

struct CallParams {
  Link link;
  State* state;
  Record* record;
  char* output;          // final memory, a slot or ordinary memory
  int64_t output_bytes;
  uint32_t tag, place;   // this call's layout, and the slot it posts if none was posted ahead
  uint32_t next_tag, next_place;  // the credit to post ahead when done; kNone: none
  uint32_t operator_id, stress_delay_us;
  int64_t call_number;
  int64_t abort;         // this rank rejected the call: tell the peers and be done
};
constexpr uint32_t kNone = 0xFFFFFFFFu;

struct Shared {
  int64_t tile;
  char* pointer;
  int32_t ok;
};

class Call {
 public:
  const CallParams& p;
  const uint32_t epoch;
  Shared* shared;

  __device__ Call(const CallParams& params, Shared* s)
      : p(params), epoch(*reinterpret_cast<volatile uint32_t*>(&params.state->epoch) + 1), shared(s) {}

  // The next tile for this block, -1 when the call has failed. Every thread gets it.
  __device__ int64_t claim() {
    if (threadIdx.x == 0) shared->tile = stopped() ? -1 : static_cast<int64_t>(atomicAdd(&p.state->next_tile, 1u));
    __syncthreads();
    const int64_t tile = shared->tile;
    __syncthreads();
    return tile;
  }

  // The slot this call receives in: the one posted ahead, if that was for this very call.
  __device__ uint32_t my_place() const {
    return posted_ahead() ? p.state->posted_place : p.place;
  }

  // Tell every peer where its slice goes. One block, before anything that waits.
  __device__ void open() {
    if (!posted_ahead()) post_credits(epoch, p.place, p.tag);
    if (threadIdx.x == 0) {
      __threadfence();
      *reinterpret_cast<volatile uint32_t*>(&p.state->opened) = epoch;
    }
  }

  // Where `peer` receives, once it has said so; null when the call has failed. Every thread gets it.
  __device__ char* destination(int peer) {
    if (threadIdx.x == 0) {
      shared->pointer = nullptr;
      const PeerEntry* entry = p.link.inbox(peer);
      uint32_t tag = 0, place = 0;
      Deadline deadline(*this);
      // A credit posted ahead for another layout is replaced by its owner when it arrives at this call.
      for (bool settled = false; !settled;) {
        if (!wait(&entry->credit_tag, epoch, &tag, deadline)) {
          fail(deadline.timed_out ? kTimeout : 0, kCredit, peer);
          break;
        }
        if (tag == kAbortTag) { fail(kRejected, kCredit, peer); break; }
        if ((tag & ~kPredicted) == p.tag) {
          wait(&entry->credit_place, epoch, &place, deadline);
          shared->pointer = p.link.locate(peer, place);
          settled = true;
        } else if (!(tag & kPredicted)) {
          fail(kBadTag, kCredit, peer);
          settled = true;
        } else if (deadline()) {
          fail(deadline.timed_out ? kTimeout : 0, kCredit, peer);
          settled = true;
        }
      }
    }
    __syncthreads();
    char* at = shared->pointer;
    __syncthreads();
    return at;
  }

  // The block has stored one of the `tiles` of its slice for `peer`; the last one raises the peer's flag.
  __device__ void tile_sent(int peer, uint32_t tiles) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence_system();
    if (atomicAdd(&p.state->tiles_done[peer], 1u) + 1 != tiles) return;
    __threadfence_system();
    if (peer != p.link.rank) {
      stress_delay(peer);
      signal(&p.link.outbox(peer)->flag, epoch, p.tag);
    }
    if (atomicAdd(&p.state->slices_sent, 1u) + 1 == static_cast<uint32_t>(p.link.world)) p.state->sends_done_ns = now_ns();
  }

  // True once the slice of `source` is here. Every thread gets the answer, and may read the slice.
  __device__ bool wait_source(int source) {
    if (threadIdx.x == 0) {
      uint32_t tag = 0;
      Deadline deadline(*this);
      shared->ok = 0;
      if (!wait(&p.link.inbox(source)->flag, epoch, &tag, deadline)) fail(deadline.timed_out ? kTimeout : 0, kData, source);
      else if (tag == kAbortTag) fail(kRejected, kData, source);
      else if (tag != p.tag) fail(kBadTag, kData, source);
      else shared->ok = 1;
    }
    __syncthreads();
    const bool ok = shared->ok;
    __syncthreads();
    return ok;
  }

  // Every block's last act. The last block to come here ends the call: on failure it tells the peers, poisons the output and
  // leaves the record; then it posts the next credit and advances the epoch.
  __device__ void close(const uint32_t* tiles_of) {
    __syncthreads();
    State* s = p.state;
    if (threadIdx.x == 0) {
      __threadfence();
      shared->ok = atomicAdd(&s->blocks_done, 1u) + 1 == gridDim.x;
      __threadfence();
    }
    __syncthreads();
    if (!shared->ok) return;
    if (p.abort || failure() || broken()) close_failed(tiles_of);
    __syncthreads();
    const bool ahead = p.next_place != kNone && !p.abort && !failure() && !broken();
    if (ahead) post_credits(epoch + 1, p.next_place, p.next_tag | kPredicted);
    __syncthreads();
    if (threadIdx.x < p.link.world) s->tiles_done[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      if (s->sends_done_ns) s->wait_ns += now_ns() - s->sends_done_ns;
      s->sends_done_ns = 0;
      *reinterpret_cast<volatile uint64_t*>(&p.record->wait_ns) = s->wait_ns;
      if (ahead) {
        s->posted_epoch = epoch + 1;
        s->posted_tag = p.next_tag;
        s->posted_place = p.next_place;
      }
      s->next_tile = s->blocks_done = s->slices_sent = 0;
      s->failed = s->failed_phase = s->failed_peer = 0;
      __threadfence();
      s->epoch = epoch;
    }
  }

  __device__ int failure() const { return *reinterpret_cast<volatile int32_t*>(&p.state->failed); }
  __device__ int broken() const { return *reinterpret_cast<volatile int32_t*>(&p.state->broken); }
  __device__ bool stopped() const { return p.abort || failure() || broken(); }

 private:
  struct Deadline {
    const Call& call;
    uint64_t end = 0;
    bool timed_out = false;
    __device__ explicit Deadline(const Call& c) : call(c) {}
    __device__ bool operator()() {
      if (call.failure() || call.broken()) return true;
      const uint64_t now = now_ns();
      if (end == 0) end = now + static_cast<uint64_t>(*reinterpret_cast<volatile int64_t*>(&call.p.record->timeout_ns));
      return timed_out = now > end;
    }
  };

  __device__ bool posted_ahead() const { return p.state->posted_epoch == epoch && p.state->posted_tag == p.tag; }

  __device__ void post_credits(uint32_t for_epoch, uint32_t place, uint32_t tag) {
    for (int r = threadIdx.x; r < p.link.world; r += blockDim.x) {
      if (r == p.link.rank) continue;
      PeerEntry* entry = p.link.outbox(r);
      store_release(&entry->credit_place, word(for_epoch, place));
      signal(&entry->credit_tag, for_epoch, tag);
    }
  }

  __device__ void fail(int code, int phase, int peer) {
    if (code == kOk) return;  // another block failed first
    if (atomicCAS(&p.state->failed, 0, code) != 0) return;
    p.state->failed_phase = phase;
    p.state->failed_peer = peer;
    if (code == kTimeout) *reinterpret_cast<volatile int32_t*>(&p.state->broken) = 1;
    __threadfence();
  }

  __device__ void close_failed(const uint32_t* tiles_of) {
    State* s = p.state;
    if (threadIdx.x == 0 && broken() && s->failed == 0) s->failed = kBroken;
    // No block stores any more: peers that got no slice learn that none will come.
    for (int r = threadIdx.x; r < p.link.world; r += blockDim.x) {
      if (r == p.link.rank) continue;
      PeerEntry* entry = p.link.outbox(r);
      if (s->tiles_done[r] < tiles_of[r] || s->tiles_done[r] == 0) signal(&entry->flag, epoch, kAbortTag);
      if (s->opened != epoch) {
        store_release(&entry->credit_place, word(epoch, p.place));
        signal(&entry->credit_tag, epoch, kAbortTag);
      }
    }
    // Every peer ends this epoch with a flag of one kind or the other. After it, it stores here no more, so that the slot
    // can be posted again.
    uint64_t late = 0;
    if (threadIdx.x == 0) {
      const uint64_t start = now_ns();
      const uint64_t limit = broken() ? 0 : static_cast<uint64_t>(p.record->timeout_ns);
      for (int r = 0; r < p.link.world; ++r) {
        if (r == p.link.rank) continue;
        uint32_t tag;
        if (!wait(&p.link.inbox(r)->flag, epoch, &tag, [&] { return now_ns() - start > limit; })) late |= 1ull << r;
      }
      if (late && !broken()) {
        if (s->failed == 0) {
          s->failed = kTimeout;
          s->failed_phase = kData;
          s->failed_peer = __ffsll(static_cast<long long>(late)) - 1;
        }
        *reinterpret_cast<volatile int32_t*>(&s->broken) = 1;
      }
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < p.output_bytes; i += blockDim.x) p.output[i] = static_cast<char>(0xFF);
    if (threadIdx.x == 0 && s->failed && *reinterpret_cast<volatile uint32_t*>(&p.record->serial) == 0) {
      Record* r = p.record;
      r->code = s->failed;
      r->phase = s->failed_phase;
      r->peer = s->failed_peer;
      r->epoch = epoch;
      r->operator_id = p.operator_id;
      r->late = late;
      r->call_number = p.call_number;
      __threadfence_system();
      *reinterpret_cast<volatile uint32_t*>(&r->serial) = epoch;
    }
  }

  __device__ void stress_delay(int peer) const {
    if (p.stress_delay_us == 0) return;
    uint32_t h = (epoch * 2654435761u) ^ (peer * 40503u + p.link.rank * 9973u);
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    const uint64_t until = now_ns() + 1000ull * (h % p.stress_delay_us);
    while (now_ns() < until) __nanosleep(200);
  }
};

}  // namespace fused_ops
