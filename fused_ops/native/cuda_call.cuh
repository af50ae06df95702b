// One call on a CUDA channel, as the warps of a kernel live it: claim tiles, find destinations, signal slices, wait for
// sources, close. The state is in device memory, so that a replayed graph is a new epoch; failures leave a record in pinned
// memory, poison the output and return.
#pragma once

#include "cuda_state.cuh"

namespace fused_ops {

struct Shared {
  char* destination[kMaxRanks];                  // null until it is known
  uint32_t end[2][kMaxRanks * kMaxSlices];       // kSends, kReceives: end of each (slice, peer)'s tiles in claim order
  uint32_t sending[kMaxRanks * kMaxSlices];      // warps of the block that are at a (slice, peer)
  uint32_t sent[kMaxRanks * kMaxSlices];         // tiles that the block has stored and not yet reported
  uint32_t warps_done;
  int32_t last;
};

class Call {
 public:
  const CallParams& p;
  const uint32_t epoch;
  Shared* shared;

  __device__ Call(const CallParams& params, Shared* s)
      : p(params),
        epoch(*reinterpret_cast<volatile uint32_t*>(&params.state->epoch) + 1),
        shared(s),
        refused_(params.abort || (params.heeds_halt && *reinterpret_cast<volatile int32_t*>(&params.state->halted))) {}

  // The slot this call receives in: the one posted ahead, if that was for this very call.
  __device__ char* my_slot() const {
    return p.link.locate(p.link.rank, posted_ahead() ? p.state->posted_place : p.place);
  }

  // The whole call, for every thread of the grid. Tiles for remote ranks come before this rank's own (for all warps but
  // `local_first_warps` of a block); the next rank's first, so that not all ranks store to one.
  //   tiles(r, slice, of), receive_tiles(source, slice): how many, at least one, since every slice has a flag; this rank's own
  //     data is slice 0 of 1
  //   store(to, r, slice, of, tile, n): store n tiles of a slice for rank r, whose output starts at `to`
  //   receive(source, slice, tile, n): the slice is here; copy n tiles of it out of the slot, where that is not the output
  template <class Tiles, class ReceiveTiles, class Store, class Receive>
  __device__ void run(Tiles&& tiles, ReceiveTiles&& receive_tiles, bool copies_out, Store&& store, Receive&& receive) {
    const int rank = p.link.rank, remote = p.link.world - 1, pairs = remote * p.slices;
    for (int k = threadIdx.x; k < pairs; k += blockDim.x) {
      shared->end[0][k] = tiles(peer_of(k), k / remote, p.slices);
      shared->end[1][k] = receive_tiles(peer_of(k), k / remote);
      shared->sending[k] = shared->sent[k] = 0;
    }
    for (int r = threadIdx.x; r < p.link.world; r += blockDim.x) shared->destination[r] = nullptr;
    if (threadIdx.x == 0) shared->warps_done = 0;
    __syncthreads();
    if (threadIdx.x < 2) {
      uint32_t sum = 0;
      for (int k = 0; k < pairs; ++k) sum = shared->end[threadIdx.x][k] += sum;
    }
    __syncthreads();
    const uint32_t receives = pairs ? shared->end[1][pairs - 1] : 0;
    auto do_receives = [&] {
      uint32_t left = receives, end;
      for (uint32_t tile; (tile = claim_run(kReceives, receives, 0, &left)) != kNone;) {
        end = receives - left;
        for (uint32_t n; tile < end; tile += n) {
          const int k = find(1, pairs, tile), source = peer_of(k), slice = k / remote;
          n = min(end, shared->end[1][k]) - tile;
          if (!wait_source(source, slice)) return;
          receive(source, slice, tile - (k ? shared->end[1][k - 1] : 0), n);
        }
      }
    };
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    if (warp == 0) open();
    if (copies_out && warp == warps - 1 && blockIdx.x < p.receive_first_blocks) do_receives();
    work(tiles(rank, 0, 1), pairs ? shared->end[0][pairs - 1] : 0, warp < p.local_first_warps, store);
    work_done(warps);
    do_receives();
    close();
  }

  // This rank's part of a call that it rejected: its peers' waits end with the abort tag, and the epoch is used up.
  __device__ void reject() {
    for (int k = threadIdx.x; k < (p.link.world - 1) * p.slices; k += blockDim.x) shared->end[0][k] = 1 + k;
    if (threadIdx.x == 0) shared->warps_done = 0;
    __syncthreads();
    close();
  }

 private:
  const bool refused_;

  struct Deadline {
    const Call& call;
    uint64_t end = 0;
    bool timed_out = false;
    __device__ explicit Deadline(const Call& c) : call(c) {}
    __device__ bool operator()() {
      if (call.stopped()) return true;
      const uint64_t now = now_ns();
      if (end == 0) end = now + static_cast<uint64_t>(call.p.state->timeout_ns);
      return timed_out = now > end;
    }
    __device__ int code() const { return timed_out ? kTimeout : kOk; }
  };

  __device__ bool stopped() const { return *reinterpret_cast<volatile int32_t*>(&p.state->stop); }
  __device__ bool broken() const { return *reinterpret_cast<volatile int32_t*>(&p.state->broken); }
  __device__ bool posted_ahead() const { return p.state->posted_epoch == epoch && p.state->posted_tag == p.tag; }
  __device__ int peer_of(int k) const { return (p.link.rank + 1 + k % (p.link.world - 1)) % p.link.world; }

  // The first of `size` tiles; kNone when none is left.
  __device__ uint32_t claim(Queue queue, uint32_t count, uint32_t size) {
    if (refused_) return kNone;
    const uint32_t claimed = lane() == 0 && !stopped() ? atomicAdd(&p.state->next_tile[queue], size) : kNone;
    const uint32_t tile = __shfl_sync(kAllLanes, claimed, 0);
    return tile < count ? tile : kNone;
  }

  // Claims a run of a queue's tiles, of which `*left` were there at the last look: a long one at first and single ones at the
  // end, since a claim takes a microsecond and the warps are to end together. They need not where `after` tiles of another
  // queue follow.
  __device__ uint32_t claim_run(Queue queue, uint32_t count, uint32_t after, uint32_t* left) {
    if (*left == 0) return kNone;
    const uint32_t warps = gridDim.x * (blockDim.x >> 5);
    const uint32_t size = max(1u, min((*left + after) / (kRunsAWarp * warps), static_cast<uint32_t>(p.most_tiles_a_run)));
    const uint32_t first = claim(queue, count, size);
    *left = first == kNone ? 0 : count - min(first + size, count);
    return first;
  }

  // All of this rank's stores. One loop with one use of `store`, which is large.
  template <class Store>
  __device__ __forceinline__ void work(uint32_t own, uint32_t sends, bool own_first, Store&& store) {
    const int rank = p.link.rank, remote = p.link.world - 1, pairs = remote * p.slices;
    bool sends_left = remote > 0, at_own = own_first || !sends_left;
    bool awaiting = !at_own;  // where remote tiles go: single tiles of its own meanwhile
    uint32_t left = at_own ? own : sends, tile = 0, end = 0;
    int sending = -1;         // the (slice, peer) that this warp's last tiles were of, and how many they were
    uint32_t tiles_sent = 0;
    for (;;) {
      if (tile == end && awaiting) {
        awaiting = !destination_known(peer_of(0)) && (tile = claim(kLocal, own, 1)) != kNone;
        end = awaiting ? tile + 1 : tile = 0;
      }
      if (tile == end) {
        tile = claim_run(at_own ? kLocal : kSends, at_own ? own : sends, at_own || p.slices > 1 ? 0 : own, &left);
        if (tile == kNone) {
          if (at_own && !sends_left) return;
          if (!at_own) {
            leave_slice(sending, tiles_sent);
            sends_left = false;
          }
          at_own = !at_own;
          left = at_own ? own : sends;
          tile = end = 0;
          continue;
        }
        end = (at_own ? own : sends) - left;
      }
      char* to = p.output;
      int r = rank, slice = 0, of = 1;
      uint32_t n = end - tile, first = tile;
      if (!awaiting && !at_own) {
        const int k = find(0, pairs, tile);
        n = min(end, shared->end[0][k]) - tile;
        first -= k ? shared->end[0][k - 1] : 0;
        if (k != sending) {
          leave_slice(sending, tiles_sent);
          sending = k;
          tiles_sent = 0;
          if (lane() == 0) atomicAdd(&shared->sending[k], 1u);
        }
        r = peer_of(k), slice = k / remote, of = p.slices;
        to = destination(r);
        tiles_sent += to ? n : 0;
      }
      if (to) store(to, r, slice, of, first, n);
      tile += n;
    }
  }

  __device__ int find(int which, int pairs, uint32_t tile) const {
    int low = 0, high = pairs - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (shared->end[which][middle] > tile) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // The first warp of the grid to come here tells every peer where its slices go, and then asks each where this rank's go; the
  // others do this rank's own tiles meanwhile.
  __device__ void open() {
    if (refused_) return;
    if (__shfl_sync(kAllLanes, lane() == 0 && atomicExch(&p.state->opening, epoch) != epoch, 0) == 0) return;
    if (!posted_ahead()) post_credits(lane(), 32, epoch, p.place, p.tag);
    __syncwarp();
    if (lane() == 0) {
      __threadfence();
      *reinterpret_cast<volatile uint32_t*>(&p.state->opened) = epoch;
    }
    for (int k = lane(); k < p.link.world - 1; k += 32) {
      uint32_t place;
      if (ask(peer_of(k), &place)) store_release(&p.state->destination[peer_of(k)], word(epoch, place));
    }
    __syncwarp();
  }

  __device__ void post_credits(int first, int step, uint32_t for_epoch, uint32_t place, uint32_t tag) {
    for (int r = first; r < p.link.world; r += step) {
      if (r == p.link.rank) continue;
      PeerEntry* entry = p.link.outbox(r);
      store_release(&entry->credit_place, word(for_epoch, place));
      signal(&entry->credit_tag, for_epoch, tag);
    }
  }

  // Where `peer` receives, once it has said so; null when the call has failed. Every lane gets it.
  __device__ char* destination(int peer) {
    uint64_t found = 0;
    if (lane() == 0) {
      auto* known = static_cast<char* volatile*>(&shared->destination[peer]);
      uint32_t place;
      if (*known == nullptr && wait(&p.state->destination[peer], epoch, &place, [&] { return stopped(); }))
        *known = p.link.locate(peer, place);
      found = reinterpret_cast<uint64_t>(*known);
    }
    found = __shfl_sync(kAllLanes, found, 0);
    __syncwarp();  // what lane 0 has seen, the warp has seen
    return reinterpret_cast<char*>(found);
  }

  __device__ bool destination_known(int peer) const {
    const int known = lane() == 0 && static_cast<uint32_t>(load_relaxed(&p.state->destination[peer]) >> 32) == epoch;
    return __shfl_sync(kAllLanes, known, 0);
  }

  __device__ bool ask(int peer, uint32_t* place) {
    const PeerEntry* entry = p.link.inbox(peer);
    uint32_t tag = 0;
    Deadline deadline(*this);
    // A credit posted ahead for another layout is replaced by its owner when it arrives at this call.
    for (;;) {
      if (!wait(&entry->credit_tag, epoch, &tag, deadline)) return fail(deadline.code(), kCredit, peer);
      if (tag >= kAbortTag) return fail(kRejected, kCredit, culprit_of(tag));
      if ((tag & ~kPredicted) == p.tag) return wait(&entry->credit_place, epoch, place, deadline) || fail(deadline.code(), kCredit, peer);
      if (!(tag & kPredicted)) return fail(kBadTag, kCredit, peer);
      if (deadline()) return fail(deadline.code(), kCredit, peer);
    }
  }

  // The warp has stored so many tiles of a (slice, peer). The last warp of the block to leave it reports for all, since a
  // report waits for the stores to arrive; the last report raises the peer's flag.
  __device__ void leave_slice(int k, uint32_t tiles_sent) {
    __syncwarp();
    if (lane() != 0 || k < 0) return;
    __threadfence_block();
    atomicAdd(&shared->sent[k], tiles_sent);
    if (atomicSub(&shared->sending[k], 1u) != 1) return;
    const uint32_t reported = atomicExch(&shared->sent[k], 0u);
    if (reported == 0 || stopped()) return;  // what was stored in a call that failed may be wrong
    __threadfence_block();
    const int peer = peer_of(k), slice = k / (p.link.world - 1);
    const uint32_t tiles = shared->end[0][k] - (k ? shared->end[0][k - 1] : 0);
    if (add_acquire_release(&p.state->tiles_done[peer * kMaxSlices + slice], reported) + reported != tiles) return;
    stress_delay(peer);
    signal(p.link.outbox(peer)->flag(epoch, slice), epoch, p.tag);
  }

  // True once that slice is here. Every lane gets the answer, and may read the slice. One warp of the device looks at the link.
  __device__ bool wait_source(int source, int slice) {
    int ok = 0;
    if (lane() == 0) {
      const int k = source * kMaxSlices + slice;
      uint64_t* arrived = &p.state->arrived[k];
      uint32_t tag;
      if (static_cast<uint32_t>(load_relaxed(arrived) >> 32) != epoch && atomicExch(&p.state->watching[k], epoch) != epoch) {
        ok = watch(source, slice, &tag);
        if (ok) store_release(arrived, word(epoch, tag));
      } else {
        ok = wait(arrived, epoch, &tag, [&] { return stopped(); });
      }
    }
    ok = __shfl_sync(kAllLanes, ok, 0);
    __syncwarp();  // what lane 0 has seen, the warp has seen
    return ok;
  }

  __device__ bool watch(int source, int slice, uint32_t* tag) {
    Deadline deadline(*this);
    if (!wait(p.link.inbox(source)->flag(epoch, slice), epoch, tag, deadline)) return fail(deadline.code(), kData, source);
    if (*tag >= kAbortTag) return fail(kRejected, kData, culprit_of(*tag));
    return *tag == p.tag || fail(kBadTag, kData, source);
  }

  // The time of the last warp to have no work left but waiting and delivery.
  __device__ void work_done(int warps) {
    if (lane() != 0 || atomicAdd(&shared->warps_done, 1u) + 1 != static_cast<uint32_t>(warps)) return;
    atomicMax(reinterpret_cast<unsigned long long*>(&p.state->work_done_ns), static_cast<unsigned long long>(now_ns()));
  }

  __device__ bool fail(int code, int phase, int peer) {
    fail_call(p.state, code, phase, peer);
    return false;
  }

  // Every block's last act. The last block to come here ends the call: on failure it tells the peers, poisons the output and
  // leaves the record; then it posts the next credit and advances the epoch.
  __device__ void close() {
    __syncthreads();
    State* s = p.state;
    if (threadIdx.x == 0) {
      __threadfence();
      shared->last = atomicAdd(&s->blocks_done, 1u) + 1 == gridDim.x;
      __threadfence();
    }
    __syncthreads();
    if (!shared->last) return;
    const bool failed = refused_ || stopped();
    if (failed) close_failed();
    __syncthreads();
    const bool ahead = p.next_place != kNone && !failed && !stopped();
    if (ahead) post_credits(threadIdx.x, blockDim.x, epoch + 1, p.next_place, p.next_tag | kPredicted);
    __syncthreads();
    for (int k = threadIdx.x; k < p.link.world * kMaxSlices; k += blockDim.x) s->tiles_done[k] = 0;
    if (threadIdx.x == 0) {
      if (s->work_done_ns) s->wait_ns += now_ns() - s->work_done_ns;
      s->work_done_ns = 0;
      *reinterpret_cast<volatile uint64_t*>(&p.record->wait_ns) = s->wait_ns;
      if (ahead) {
        s->posted_epoch = epoch + 1;
        s->posted_tag = p.next_tag;
        s->posted_place = p.next_place;
      }
      for (int q = 0; q < kQueues; ++q) s->next_tile[q] = 0;
      s->blocks_done = 0;
      s->failed = s->failed_phase = s->failed_peer = 0;
      s->stop = broken();
      __threadfence();
      s->epoch = epoch;
    }
  }

  __device__ void close_failed() {
    State* s = p.state;
    const int remote = p.link.world - 1;
    if (threadIdx.x == 0 && s->failed == 0 && !p.abort) s->failed = broken() ? kBroken : kHalted;
    __syncthreads();
    const uint32_t tag_of_failure = kAbortTag + (s->failed == kRejected ? s->failed_peer : p.link.rank);  // passed on
    // No warp stores any more: peers that lack a slice learn that none will come. Their layout may have more slices.
    for (int k = threadIdx.x; k < remote * kMaxSlices; k += blockDim.x) {
      const int peer = peer_of(k), slice = k / remote;
      PeerEntry* entry = p.link.outbox(peer);
      stress_delay(peer);
      if (slice >= p.slices || s->tiles_done[peer * kMaxSlices + slice] != shared->end[0][k] - (k ? shared->end[0][k - 1] : 0))
        signal(entry->flag(epoch, slice), epoch, tag_of_failure);
      if (slice == 0 && s->opened != epoch) {
        store_release(&entry->credit_place, word(epoch, p.place));
        signal(&entry->credit_tag, epoch, tag_of_failure);
      }
    }
    __syncthreads();
    // Every peer ends this epoch with flags of one kind or the other: those of its slices where it succeeds, all where it
    // fails. After them it stores here no more, so that the slot can be posted again.
    uint64_t late = 0;
    if (threadIdx.x == 0) {
      const uint64_t start = now_ns();
      const uint64_t limit = broken() ? 0 : static_cast<uint64_t>(s->timeout_ns);
      for (int k = 0; k < remote; ++k) {
        const int peer = peer_of(k);
        int slices = 1;
        for (int slice = 0; slice < slices; ++slice) {
          uint32_t tag;
          if (!wait(p.link.inbox(peer)->flag(epoch, slice), epoch, &tag, [&] { return now_ns() - start > limit; })) {
            late |= 1ull << peer;
            break;
          }
          if (slice == 0) slices = !p.abort && tag == p.tag ? p.slices : kMaxSlices;
        }
      }
      if (late && !broken()) {
        if (s->failed == 0) {
          s->failed = kTimeout;
          s->failed_phase = kData;
          s->failed_peer = __ffsll(static_cast<long long>(late)) - 1;
        }
        *reinterpret_cast<volatile int32_t*>(&s->broken) = 1;
      }
      if (s->failed) s->halted = 1;  // a call that its own host rejected is raised already
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
      r->bad = s->bad;
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
