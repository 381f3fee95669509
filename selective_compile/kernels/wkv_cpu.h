// wkv (RWKV-4): lanes run along the channels.
//
// heads C; inputs key, value [T, C]; parameters time_decay, time_first [C]; slot [C, 3].

#pragma once

#include "state_call.h"

namespace {

class Wkv {
 public:
  static constexpr int64_t BLOCK = 1024;  // most channels of a block

  explicit Wkv(const Call& call) : call_(call), block_(channels_of_block(call, call.heads, BLOCK)) {}

  int64_t blocks() const { return (call_.heads + block_ - 1) / block_; }

  void run(int64_t block, const Request* requests, int64_t count) const {
    const int64_t first = block * block_, channels = std::min(block_, call_.heads - first);
    float *state = scratch_of_thread.floats(8 * BLOCK), *parameters = state + 3 * BLOCK, *memory = state + 5 * BLOCK;
    for (int i = 0; i < 2; ++i) widen(parameters + i * BLOCK, call_.parameters[i] + first, channels);
    for (const Request* request = requests; request < requests + count; ++request) {
      const float* before = request->before(first * 3);
      for (int64_t i = 0; i < 3; ++i)
        for (int64_t c = 0; c < BLOCK; ++c) state[i * BLOCK + c] = i < 2 ? 0.f : -1e38f;
      for (int64_t c = 0; before && c < channels; ++c)
        for (int64_t i = 0; i < 3; ++i) state[i * BLOCK + c] = before[c * 3 + i];
      for (int64_t t = request->begin; t < request->begin + request->rows; ++t)
        advance(t, first, channels, parameters, state, memory);
      float* after = request->after(first * 3);
      for (int64_t c = 0; after && c < channels; ++c)
        for (int64_t i = 0; i < 3; ++i) after[c * 3 + i] = state[i * BLOCK + c];
    }
  }

 private:
  void advance(int64_t t, int64_t first, int64_t channels, const float* parameters, float* state, float* key) const {
    float *value = key + BLOCK, *output = value + BLOCK;
    read_row(key, call_.inputs[0], t, 0, first, channels);
    read_row(value, call_.inputs[1], t, 0, first, channels);
    for (int64_t c = 0; c < channels; c += W) {
      const vf k = load(key + c), v = load(value + c), past = load(state + 2 * BLOCK + c);
      vf p = load(state + c), q = load(state + BLOCK + c);
      const vf bonus = k + load(parameters + BLOCK + c), now = larger(past, bonus);
      vf old = exponential(past - now), fresh = exponential(bonus - now);
      store(output + c, (old * p + fresh * v) / (old * q + fresh));
      const vf faded = past + load(parameters + c), next = larger(faded, k);
      old = exponential(faded - next), fresh = exponential(k - next);
      store(state + c, old * p + fresh * v);
      store(state + BLOCK + c, old * q + fresh);
      store(state + 2 * BLOCK + c, next);
    }
    write_row(call_, t * call_.heads + first, output, channels);
  }

  // Of what is at most 0.
  static vf exponential(vf x) { return exp2(x * LOG2E); }

  const Call& call_;
  const int64_t block_;
};

}  // namespace
