// C interface of a host channel: creation, the agreement, credits. Operators add their own entry points beside this one.
#include "host_link.h"

using namespace fused_ops;

extern "C" {

int64_t fo_control_bytes(int world) { return static_cast<int64_t>(control_bytes(world)); }
int fo_text_bytes() { return kTextBytes; }
int fo_ring_calls() { return kRing; }

void* fo_channel_create(int rank, int world, const int64_t* control, const int32_t* pid, int (*interrupted)()) {
  auto* ch = new Channel{};
  ch->rank = rank;
  ch->world = world;
  ch->interrupted = interrupted;
  ch->mapped.resize(world);
  ch->rng.seed(rank + 1);
  for (int r = 0; r < world; ++r) {
    ch->control.push_back(reinterpret_cast<char*>(control[r]));
    ch->pid.push_back(pid[r]);
    ch->pidfd.push_back(r == rank ? -1 : static_cast<int>(syscall(SYS_pidfd_open, pid[r], 0)));
  }
  return ch;
}

void fo_channel_destroy(void* handle) {
  auto* ch = static_cast<Channel*>(handle);
  for (auto& slots : ch->mapped)
    for (auto& [slot, at] : slots) munmap(at.first, at.second);
  for (int fd : ch->pidfd)
    if (fd >= 0) close(fd);
  delete ch;
}

void fo_set_timeout(void* handle, int64_t ns) { static_cast<Channel*>(handle)->timeout_ns = ns; }
void fo_set_delay(void* handle, int64_t us, int64_t seed) {
  auto* ch = static_cast<Channel*>(handle);
  ch->delay_us = us;
  ch->rng.seed(seed);
}

// Posts this rank's facts of `call`. A rank that rejects call after call must not lap a peer that has yet to read them.
void fo_post_descriptor(void* handle, int64_t call, int rejected, int64_t hash, const char* text, const int64_t* row, Result* result) {
  auto* ch = static_cast<Channel*>(handle);
  if (call > kRing) {
    Status s = ch->wait_for(ch->others(), call, kAgreement, result, [&](int r) {
      return ch->head(r)->latest_call.load(std::memory_order_acquire) > call - kRing;
    });
    if (s != kOk) return;
  }
  Descriptor* d = ch->descriptor(ch->rank, call);
  d->call.store(0, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  d->rejected = rejected;
  d->hash = hash;
  strncpy(d->text, text, kTextBytes - 1);
  d->text[kTextBytes - 1] = 0;
  if (row) memcpy(d->row, row, 2 * ch->world * sizeof(int64_t));
  else memset(d->row, 0, 2 * ch->world * sizeof(int64_t));
  d->call.store(call, std::memory_order_release);
  ch->head(ch->rank)->latest_call.store(call, std::memory_order_release);
  if (rejected)
    for (int r : ch->others()) ch->ring(r);
}

// Waits until every peer has posted `call`, then copies their descriptors out (this rank's own included).
void fo_gather_descriptors(void* handle, int64_t call, int64_t* hashes, char* texts, int64_t* rows, Result* result) {
  auto* ch = static_cast<Channel*>(handle);
  for (int r : ch->others()) ch->ring(r);  // they may sleep on this rank's post
  Status s = ch->wait_for(ch->others(), call, kAgreement, result,
                          [&](int r) { return ch->head(r)->latest_call.load(std::memory_order_acquire) >= call; });
  if (s != kOk) return;
  for (int r = 0; r < ch->world; ++r) {
    Descriptor* d = ch->descriptor(r, call);
    if (d->call.load(std::memory_order_acquire) != call) {
      ch->fail(result, kOverrun, kAgreement, r);
      return;
    }
    hashes[r] = d->hash;
    memcpy(texts + r * kTextBytes, d->text, kTextBytes);
    memcpy(rows + r * 2 * ch->world, d->row, 2 * ch->world * sizeof(int64_t));
    const bool rejected = d->rejected;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (d->call.load(std::memory_order_relaxed) != call) {
      ch->fail(result, kOverrun, kAgreement, r);
      return;
    }
    if (rejected) {
      ch->fail(result, kRejected, kAgreement, r);
      return;
    }
  }
}

// Tells every sender where its slice of epoch `call` goes in this rank's slot: `offsets[r]`, room for `bytes[r]`.
void fo_post_credits(void* handle, int64_t call, uint32_t tag, int64_t slot, int64_t fd, int64_t slot_bytes, int64_t oldest_live_slot,
                     const int64_t* offsets, const int64_t* bytes) {
  auto* ch = static_cast<Channel*>(handle);
  for (int r : ch->remote_first()) {
    Credit* c = ch->credit(r, ch->rank);
    c->value.store(0, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    c->slot = slot;
    c->fd = fd;
    c->slot_bytes = slot_bytes;
    c->offset = offsets[r];
    c->bytes = bytes[r];
    c->oldest_live_slot = oldest_live_slot;
    c->value.store(word(static_cast<uint32_t>(call), tag), std::memory_order_release);
    if (r != ch->rank) ch->ring(r);
  }
}

int64_t fo_latest_call(void* handle, int rank) { return static_cast<Channel*>(handle)->head(rank)->latest_call.load(std::memory_order_acquire); }

void fo_mark_broken(void* handle, const char* text) {
  auto* ch = static_cast<Channel*>(handle);
  Control* c = ch->head(ch->rank);
  strncpy(c->broken_text, text, kTextBytes - 1);
  c->broken.store(1, std::memory_order_release);
  for (int r : ch->others()) ch->ring(r);
}

// Whether that rank posted other facts than this one for a call, rather than rejecting it.
int fo_disagrees(void* handle, int rank, int64_t call) {
  auto* ch = static_cast<Channel*>(handle);
  return ch->disagrees(rank, call) && !ch->rejects(rank, call);
}

void fo_reason(void* handle, int rank, int64_t call, int broken, char* text) {
  auto* ch = static_cast<Channel*>(handle);
  memcpy(text, broken ? ch->head(rank)->broken_text : ch->descriptor(rank, call)->text, kTextBytes);
}

int fo_late(void* handle, int32_t* ranks) {
  auto* ch = static_cast<Channel*>(handle);
  for (size_t i = 0; i < ch->late.size(); ++i) ranks[i] = ch->late[i];
  return static_cast<int>(ch->late.size());
}

}  // extern "C"
