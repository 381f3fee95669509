// ssd (Mamba-2): lanes run along n, four rows of the state at a time.
//
// heads H, groups G, value_size P, size n; inputs x [T, H, P], dt [T, H], B, C [T, G, n]; parameters A, D [H];
// slot [H, P, n].
//
// The chunked form that GPUs use multiplies as often on a machine without matrix units: what it saves is loads and
// stores of the state, which lie in the nearest cache here.

#pragma once

#include <cmath>

#include "state_call.h"

namespace {

class Ssd {
 public:
  static constexpr int64_t FLOATS = 4096;  // of a block's state: half of the smallest nearest cache

  explicit Ssd(const Call& call)
      : call_(call), width_(round_up(call.size, W)),
        block_(std::max<int64_t>(4, std::min(round_up(call.value_size, 4), FLOATS / width_ / 4 * 4))) {}

  int64_t blocks() const { return call_.heads * per_head(); }

  void run(int64_t block, const Request* requests, int64_t count) const {
    const int64_t head = block / per_head(), first = block % per_head() * block_;
    const int64_t lines = std::min(block_, call_.value_size - first), padded = round_up(lines, 4);
    float* memory = scratch_of_thread.floats(block_ * width_ + 2 * width_ + 2 * round_up(block_, W));
    float* copy = memory + 2 * width_ + 2 * round_up(block_, W);
    const int64_t offset = (head * call_.value_size + first) * call_.size;
    for (const Request* request = requests; request < requests + count; ++request) {
      // A slot that has the layout of a copy is not copied: a decode step then goes through it once.
      const bool in_place = !request->fresh && call_.size == width_ && lines == padded;
      float* state = in_place ? request->after(offset) : copy;
      if (!in_place) {
        load_state(state, request->before(offset), lines, call_.size, width_, call_.size);
        std::fill(state + lines * width_, state + padded * width_, 0.f);
      }
      for (int64_t t = request->begin; t < request->begin + request->rows; ++t)
        advance(t, head, first, lines, state, memory);
      if (!in_place) keep_state(request->after(offset), state, lines, call_.size, width_, call_.size);
    }
  }

 private:
  int64_t per_head() const { return (call_.value_size + block_ - 1) / block_; }

  void advance(int64_t t, int64_t head, int64_t first, int64_t lines, float* state, float* b) const {
    float *c = b + width_, *x = c + width_, *sums = x + round_up(block_, W);
    const int64_t group = head / (call_.heads / call_.groups);
    std::fill(x, x + round_up(block_, W), 0.f);
    read_row(x, call_.inputs[0], t, head, first, lines);
    read_row(b, call_.inputs[2], t, group, 0, call_.size);
    read_row(c, call_.inputs[3], t, group, 0, call_.size);
    const float dt = read_one(call_.inputs[1], t, head), decay = std::exp(dt * call_.parameters[0][head]);
    const int64_t width = width_;  // a local, which no store of the loop can change
    for (int64_t i = 0; i < lines; i += 4) {
      vf sum[4] = {}, input[4];
      for (int j = 0; j < 4; ++j) input[j] = splat(dt * x[i + j]);
      for (int64_t n = 0; n < width; n += W) {
        const vf key = load(b + n), query = load(c + n);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          float* at = state + (i + j) * width + n;
          // What is fetched ahead by itself is one row at a time: without this a decode step takes twice as long.
          __builtin_prefetch(at + 16 * width);
          vf h = load(at) * decay + input[j] * key;
          store(at, h);
          sum[j] += h * query;
        }
      }
      sum4(sums + i, sum[0], sum[1], sum[2], sum[3]);
    }
    const float skip = call_.parameters[1] ? call_.parameters[1][head] : 0.f;
    for (int64_t i = 0; i < lines; i += W) store(sums + i, load(sums + i) + load(x + i) * skip);
    write_row(call_, (t * call_.heads + head) * call_.value_size + first, sums, lines);
  }

  const Call& call_;
  const int64_t width_, block_;
};

}  // namespace
