// selective_scan (Mamba-1): lanes run along a channel's n numbers, four channels at a time.
//
// heads I, groups G, size n; inputs x, dt [T, I], B, C [T, G, n]; parameters A [I, n], D [I]; slot [I, n].

#pragma once

#include "state_call.h"

namespace {

class SelectiveScan {
 public:
  static constexpr int64_t BLOCK = 256;  // most channels of a block, all of one group

  explicit SelectiveScan(const Call& call)
      : call_(call), members_(call.heads / call.groups), width_(round_up(call.size, W)),
        block_(channels_of_block(call, members_, BLOCK)) {}

  int64_t blocks() const { return call_.groups * per_group(); }

  void run(int64_t block, const Request* requests, int64_t count) const {
    const int64_t group = block / per_group(), within = block % per_group() * block_;
    const int64_t first = group * members_ + within, channels = std::min(block_, members_ - within);
    float* memory = scratch_of_thread.floats(2 * BLOCK * width_ + 2 * width_ + 4 * BLOCK + 8 * W);
    float *rates = memory, *copy = rates + BLOCK * width_, *skip = copy + BLOCK * width_;
    load_state(rates, call_.parameters[0] + first * call_.size, channels, call_.size, width_, call_.size);
    for (int64_t i = 0; i < channels * width_; i += W) store(rates + i, load(rates + i) * LOG2E);
    std::fill(skip, skip + BLOCK, 0.f);
    if (call_.parameters[1]) std::copy_n(call_.parameters[1] + first, channels, skip);
    for (const Request* request = requests; request < requests + count; ++request) {
      const int64_t offset = first * call_.size;
      // A slot that has the layout of a copy is not copied.
      const bool in_place = !request->fresh && call_.size == width_ && channels % 4 == 0;
      float* state = in_place ? request->after(offset) : copy;
      if (!in_place) load_state(state, request->before(offset), channels, call_.size, width_, call_.size);
      // Whole fours of channels are computed; of those that are none, nothing is kept.
      for (int64_t i = channels * width_; i < round_up(channels, 4) * width_; ++i) rates[i] = state[i] = 0;
      for (int64_t t = request->begin; t < request->begin + request->rows; ++t)
        advance(t, group, first, channels, rates, state, skip, skip + BLOCK);
      if (!in_place) keep_state(request->after(offset), state, channels, call_.size, width_, call_.size);
    }
  }

 private:
  int64_t per_group() const { return (members_ + block_ - 1) / block_; }

  void advance(int64_t t, int64_t group, int64_t first, int64_t channels, const float* rates, float* state,
               const float* skip, float* memory) const {
    float *x = memory, *dt = x + BLOCK, *sums = dt + BLOCK, *b = sums + BLOCK, *c = b + width_;
    std::fill(x, x + 2 * BLOCK, 0.f);
    read_row(x, call_.inputs[0], t, 0, first, channels);
    read_row(dt, call_.inputs[1], t, 0, first, channels);
    read_row(b, call_.inputs[2], t, group, 0, call_.size);
    read_row(c, call_.inputs[3], t, group, 0, call_.size);
    for (int64_t i = 0; i < channels; i += 4) {
      vf sum[4] = {};
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const float step = dt[i + j], input = step * x[i + j];
        for (int64_t n = 0; n < width_; n += W) {
          float* at = state + (i + j) * width_ + n;
          vf h = exp2_any(load(rates + (i + j) * width_ + n) * step) * load(at) + load(b + n) * input;
          store(at, h);
          sum[j] += h * load(c + n);
        }
      }
      sum4(sums + i, sum[0], sum[1], sum[2], sum[3]);
    }
    for (int64_t i = 0; i < channels; i += W) store(sums + i, load(sums + i) + load(skip + i) * load(x + i));
    write_row(call_, t * call_.heads + first, sums, channels);
  }

  const Call& call_;
  const int64_t members_, width_, block_;
};

}  // namespace
