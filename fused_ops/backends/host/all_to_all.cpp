// All-to-All over the host link: each slice is copied straight to its place in the receiver's output.
#include "host_link.h"

using namespace fused_ops;

// send_offsets / send_bytes: where this rank's slice for each peer starts in `input`, and its length.
// own: where this rank's slice for itself goes in its own slot.
extern "C" void fo_all_to_all(void* handle, int64_t call, uint32_t tag, const char* input, const int64_t* send_offsets,
                              const int64_t* send_bytes, char* own, Result* result) {
  auto* ch = static_cast<Channel*>(handle);
  for (int r : ch->remote_first()) {
    if (r == ch->rank) {
      if (send_bytes[r]) Channel::put_slice(own, input + send_offsets[r], 1, send_bytes[r], send_bytes[r], send_bytes[r]);
      continue;
    }
    char* destination;
    if (ch->wait_credit(r, call, tag, send_bytes[r], result, &destination) != kOk) return;
    if (send_bytes[r]) Channel::put_slice(destination, input + send_offsets[r], 1, send_bytes[r], send_bytes[r], send_bytes[r]);
    ch->signal(r, call, tag);
  }
  ch->wait(ch->others(), call, tag, result);
}
