// The host link: processes of one machine that map each other's memory.
//
// A channel's control area (one per rank, mapped by every peer) holds the descriptor ring of the agreement, the credits and
// the flags. Data goes into slots, one shared-memory file each, which a sender maps the first time a credit names it.
// put_slice / signal / wait below are all that an operator uses to reach a peer.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace fused_ops {

constexpr int kRing = 64;       // calls a fast rank may be ahead of the slowest reader of its descriptors
constexpr int kTextBytes = 512;
constexpr size_t kMappings = 256;  // slots of one peer kept mapped, dead ones among them; its pool holds fewer

enum Status : int32_t { kOk = 0, kTimeout = 1, kLost = 2, kRejected = 3, kBroken = 4, kInterrupted = 5, kBadCredit = 6, kOverrun = 7, kBadTag = 8 };
enum Phase : int32_t { kAgreement = 1, kCredit = 2, kData = 3 };

inline uint64_t word(uint32_t epoch, uint32_t tag) { return (static_cast<uint64_t>(epoch) << 32) | tag; }

struct alignas(64) Flag {
  std::atomic<uint64_t> value;
};

struct Place {
  int64_t slot, fd, slot_bytes, offset, bytes, oldest_live_slot;
};

struct alignas(64) Credit : Place {
  std::atomic<uint64_t> value;  // word(epoch, tag), stored last; 0 while being written

  // Copies the place out if the credit is `want`. Its owner may retract a credit that it posted ahead, at any moment.
  bool read(uint64_t want, Place* place) const {
    if (value.load(std::memory_order_acquire) != want) return false;
    *place = *this;
    std::atomic_thread_fence(std::memory_order_acquire);
    return value.load(std::memory_order_relaxed) == want;
  }
};

struct Descriptor {
  std::atomic<int64_t> call;  // stored last; 0 while being written
  int64_t rejected, hash;
  char text[kTextBytes];
  int64_t row[];  // 2 * world
};

struct Control {
  std::atomic<uint32_t> doorbell, sleepers;
  std::atomic<int64_t> broken, latest_call;
  char broken_text[kTextBytes];
};

inline size_t align64(size_t n) { return (n + 63) / 64 * 64; }
inline size_t descriptor_bytes(int world) { return align64(sizeof(Descriptor) + 2 * world * sizeof(int64_t)); }
inline size_t control_bytes(int world) {
  return align64(sizeof(Control)) + world * (sizeof(Flag) + sizeof(Credit)) + kRing * descriptor_bytes(world);
}

struct Result {
  int32_t status = kOk, phase = 0;
  int64_t wait_ns = 0;
  int32_t late_count = 0, detail_rank = -1;
};

using Clock = std::chrono::steady_clock;

struct Channel {
  int rank, world;
  std::vector<char*> control;
  std::vector<int> pid, pidfd;
  std::vector<std::map<int64_t, std::pair<char*, size_t>>> mapped;  // peer -> slot -> mapping
  std::vector<int32_t> late;
  int64_t timeout_ns = 600LL * 1000000000;
  int (*interrupted)() = nullptr;  // asked about once a second while waiting
  int64_t delay_us = 0;            // stress tests: up to this long between data and flag
  std::mt19937_64 rng{1};

  Control* head(int r) { return reinterpret_cast<Control*>(control[r]); }
  Flag* flag(int owner, int source) { return reinterpret_cast<Flag*>(control[owner] + align64(sizeof(Control))) + source; }
  Credit* credit(int owner, int from) {
    return reinterpret_cast<Credit*>(control[owner] + align64(sizeof(Control)) + world * sizeof(Flag)) + from;
  }
  Descriptor* descriptor(int owner, int64_t call) {
    char* ring = control[owner] + align64(sizeof(Control)) + world * (sizeof(Flag) + sizeof(Credit));
    return reinterpret_cast<Descriptor*>(ring + (call % kRing) * descriptor_bytes(world));
  }

  void ring(int r) {
    Control* c = head(r);
    c->doorbell.fetch_add(1, std::memory_order_seq_cst);
    if (c->sleepers.load(std::memory_order_seq_cst) != 0)
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&c->doorbell), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
  }

  // Where the kernel gives no pidfd (too old, filtered, or the process ended before it was asked for).
  static bool runs(int pid) {
    char path[64], line[512] = {};
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno != ENOENT;
    const ssize_t length = read(fd, line, sizeof line - 1);
    close(fd);
    const char* name_end = length > 0 ? strrchr(line, ')') : nullptr;
    return name_end == nullptr || (name_end[2] != 'Z' && name_end[2] != 'X');
  }

  bool gone(int r) {
    if (r == rank) return false;
    if (pidfd[r] < 0) return !runs(pid[r]);
    pollfd p{pidfd[r], POLLIN, 0};
    return poll(&p, 1, 0) == 1;
  }

  bool rejects(int r, int64_t call) {
    Descriptor* d = descriptor(r, call);
    return d->call.load(std::memory_order_acquire) == call && d->rejected;
  }

  // A peer that has reached this call with other facts than this rank's: it will never meet this rank's waits.
  bool disagrees(int r, int64_t call) {
    Descriptor* theirs = descriptor(r, call);
    return theirs->call.load(std::memory_order_acquire) == call && theirs->hash != descriptor(rank, call)->hash;
  }

  // Blocks until ready(peer) holds for every peer that `needed` marks; yields its core, and gives up on a timeout, a peer
  // that died, rejected this call or broke the channel.
  template <class Ready>
  Status wait_for(const std::vector<int>& peers, int64_t call, Phase phase, Result* result, Ready ready) {
    std::vector<int> missing;
    for (int r : peers)
      if (!ready(r)) missing.push_back(r);
    if (missing.empty()) return kOk;
    const std::vector<int> all = others();
    Control* mine = head(rank);
    const auto start = Clock::now();
    auto next_look = start + std::chrono::milliseconds(50);
    auto next_interrupt = start + std::chrono::seconds(1);
    Status status = kOk;
    for (int spin = 0;; ++spin) {
      const uint32_t bell = mine->doorbell.load(std::memory_order_seq_cst);
      missing.erase(std::remove_if(missing.begin(), missing.end(), ready), missing.end());
      if (missing.empty()) break;
      if (spin < 64) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        continue;
      }
      const auto now = Clock::now();
      for (int r : missing)
        if (head(r)->broken.load(std::memory_order_acquire)) { status = kBroken; result->detail_rank = r; break; }
      // Any rank can spoil the call for all. The peer waited for may have noticed, and gone on without a trace of this call.
      if (phase != kAgreement)
        for (int r : all) {
          if (rejects(r, call)) status = kRejected;
          else if (disagrees(r, call)) status = kBadTag;
          else continue;
          result->detail_rank = r;
          break;
        }
      if (status == kOk && now >= next_look) {
        next_look = now + std::chrono::milliseconds(50);
        for (int r : missing)
          // A peer may finish its part and exit at once: look at the flag again after seeing it gone.
          if (gone(r) && !ready(r)) { status = kLost; result->detail_rank = r; break; }
        if (now - start > std::chrono::nanoseconds(timeout_ns)) status = kTimeout;
        if (status == kOk && interrupted && now >= next_interrupt) {
          next_interrupt = now + std::chrono::seconds(1);
          if (interrupted()) status = kInterrupted;
        }
      }
      if (status != kOk) break;
      if (spin < 80) {
        sched_yield();
        continue;
      }
      mine->sleepers.fetch_add(1, std::memory_order_seq_cst);
      timespec nap{0, 20 * 1000 * 1000};
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&mine->doorbell), FUTEX_WAIT, bell, &nap, nullptr, 0);
      mine->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
    result->wait_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
    if (status == kOk) return kOk;
    result->status = status;
    result->phase = phase;
    late.clear();
    for (int r : missing) late.push_back(r);
    result->late_count = static_cast<int32_t>(late.size());
    return status;
  }

  // Where this rank's slice of `bytes` goes in `peer`'s memory, once the peer has posted the credit of this epoch.
  Status wait_credit(int peer, int64_t call, uint32_t tag, int64_t bytes, Result* result, char** destination) {
    const uint64_t want = word(static_cast<uint32_t>(call), tag);
    Credit* c = credit(rank, peer);
    Place place;
    Status s = wait_for({peer}, call, kCredit, result, [&](int) { return c->read(want, &place); });
    if (s != kOk) return s;
    auto& slots = mapped[peer];
    const bool known = slots.count(place.slot) != 0;
    while (!slots.empty() && (slots.begin()->first < place.oldest_live_slot || (!known && slots.size() >= kMappings))) {
      munmap(slots.begin()->second.first, slots.begin()->second.second);
      slots.erase(slots.begin());
    }
    if (bytes != place.bytes || place.offset < 0 || place.offset + bytes > place.slot_bytes) return fail(result, kBadCredit, kCredit, peer);
    if (bytes == 0) { *destination = nullptr; return kOk; }
    auto found = slots.find(place.slot);
    if (found == slots.end()) {
      char path[64];
      snprintf(path, sizeof path, "/proc/%d/fd/%d", pid[peer], static_cast<int>(place.fd));
      int fd = open(path, O_RDWR | O_CLOEXEC);
      if (fd < 0) return fail(result, gone(peer) ? kLost : kBadCredit, kCredit, peer);
      void* at = mmap(nullptr, place.slot_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      close(fd);
      if (at == MAP_FAILED) return fail(result, kBadCredit, kCredit, peer);
      found = slots.emplace(place.slot, std::make_pair(static_cast<char*>(at), static_cast<size_t>(place.slot_bytes))).first;
    }
    *destination = found->second.first + place.offset;
    return kOk;
  }

  Status fail(Result* result, Status status, Phase phase, int peer) {
    result->status = status;
    result->phase = phase;
    result->detail_rank = peer;
    return status;
  }

  // ---- the three functions an operator reaches its peers with ----

  // Rows of `row_bytes`, `stride` apart at the source, packed `to_stride` apart at the destination.
  static void put_slice(char* destination, const char* source, int64_t rows, int64_t row_bytes, int64_t to_stride, int64_t stride) {
    if (row_bytes == to_stride && row_bytes == stride) {
      memcpy(destination, source, rows * row_bytes);
      return;
    }
    for (int64_t i = 0; i < rows; ++i) memcpy(destination + i * to_stride, source + i * stride, row_bytes);
  }

  void signal(int peer, int64_t call, uint32_t tag) {
    if (delay_us > 0) usleep(rng() % delay_us);
    flag(peer, rank)->value.store(word(static_cast<uint32_t>(call), tag), std::memory_order_release);
    ring(peer);
  }

  Status wait(const std::vector<int>& sources, int64_t call, uint32_t tag, Result* result) {
    const uint32_t epoch = static_cast<uint32_t>(call);
    Status s = wait_for(sources, call, kData, result, [&](int r) {
      return static_cast<uint32_t>(flag(rank, r)->value.load(std::memory_order_acquire) >> 32) == epoch;
    });
    if (s != kOk) return s;
    for (int r : sources)
      if (static_cast<uint32_t>(flag(rank, r)->value.load(std::memory_order_acquire)) != tag) return fail(result, kBadTag, kData, r);
    return kOk;
  }

  // Remote ranks first, starting behind this one so that ranks do not all store to the same peer; this rank last.
  std::vector<int> remote_first() const {
    std::vector<int> order;
    for (int i = 1; i <= world; ++i) order.push_back((rank + i) % world);
    return order;
  }
  std::vector<int> others() const {
    std::vector<int> order = remote_first();
    order.pop_back();
    return order;
  }
};

}  // namespace fused_ops
