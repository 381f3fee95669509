// linear_recurrence: lanes run along the channels.
//
// heads C; inputs decay, update [T, C]; slot [C].

#pragma once

#include "state_call.h"

namespace {

class LinearRecurrence {
 public:
  static constexpr int64_t BLOCK = 1024;  // most channels of a block

  explicit LinearRecurrence(const Call& call) : call_(call), block_(channels_of_block(call, call.heads, BLOCK)) {}

  int64_t blocks() const { return (call_.heads + block_ - 1) / block_; }

  void run(int64_t block, const Request* requests, int64_t count) const {
    const int64_t first = block * block_, channels = std::min(block_, call_.heads - first);
    float *state = scratch_of_thread.floats(3 * BLOCK), *decay = state + BLOCK, *update = decay + BLOCK;
    for (const Request* request = requests; request < requests + count; ++request) {
      load_state(state, request->before(first), 1, channels, BLOCK, channels);
      for (int64_t t = request->begin; t < request->begin + request->rows; ++t) {
        read_row(decay, call_.inputs[0], t, 0, first, channels);
        read_row(update, call_.inputs[1], t, 0, first, channels);
        for (int64_t c = 0; c < channels; c += W)
          store(state + c, load(state + c) * load(decay + c) + load(update + c));
        write_row(call_, t * call_.heads + first, state, channels);
      }
      keep_state(request->after(first), state, 1, channels, BLOCK, channels);
    }
  }

 private:
  const Call& call_;
  const int64_t block_;
};

}  // namespace
