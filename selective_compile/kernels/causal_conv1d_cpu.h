// causal_conv1d: lanes run along the channels; the window of a token is a pointer to each of its W rows.
//
// heads C, size W, flag silu; inputs x [T, C]; parameters weight [C, W], bias [C]; slot [C, W - 1] of x's dtype.

#pragma once

#include "state_call.h"

namespace {

// TAPS: W where the compiler shall know it, so that it can turn a slot round with shuffles; else 0.
template <typename T, int TAPS> class CausalConv1d {
 public:
  static constexpr int64_t BLOCK = 1024;  // most channels of a block

  explicit CausalConv1d(const Call& call)
      : call_(call), taps_(TAPS ? TAPS : call.size), block_(channels_of_block(call, call.heads, BLOCK)) {}

  int64_t blocks() const { return (call_.heads + block_ - 1) / block_; }

  void run(int64_t block, const Request* requests, int64_t count) const {
    const int64_t taps = TAPS ? TAPS : taps_, first = block * block_, channels = std::min(block_, call_.heads - first);
    float* memory = scratch_of_thread.floats((taps + 1) * BLOCK + taps * BLOCK + taps * 2);
    float *weight = memory, *bias = weight + taps * BLOCK, *rows = bias + BLOCK;
    const T** window = reinterpret_cast<const T**>(rows + taps * BLOCK);
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t w = 0; w < taps; ++w) weight[w * BLOCK + c] = call_.parameters[0][(first + c) * taps + w];
    std::fill(bias, bias + BLOCK, 0.f);
    if (call_.parameters[1]) std::copy_n(call_.parameters[1] + first, channels, bias);
    for (const Request* request = requests; request < requests + count; ++request)
      run_request(*request, first, channels, weight, bias, reinterpret_cast<T*>(rows), window);
  }

 private:
  void run_request(const Request& request, int64_t first, int64_t channels, const float* weight, const float* bias,
                   T* past, const T** window) const {
    const int64_t taps = TAPS ? TAPS : taps_, kept = taps - 1, stride = call_.inputs[0].row;
    const T* x = reinterpret_cast<const T*>(call_.inputs[0].data) + request.begin * stride + first;
    T* slot = reinterpret_cast<T*>(request.slot) + first * kept;
    if (request.fresh) std::fill(past, past + kept * BLOCK, T{});
    else turn(past, slot, channels, kept);
    auto row = [&](int64_t t) { return t < 0 ? past + (t + kept) * BLOCK : x + t * stride; };
    for (int64_t t = 0; t < request.rows; ++t) {
      for (int64_t w = 0; w < taps; ++w) window[w] = row(t + w - kept);
      T* output = reinterpret_cast<T*>(call_.output) + (request.begin + t) * call_.heads + first;
      int64_t c = 0;
      for (; c + W <= channels; c += W) store(output + c, convolve(window, c, weight, bias));
      if (c < channels) finish(window, c, channels - c, weight, bias, output);
    }
    if (!request.slot) return;
    for (int64_t w = 0; w < kept; ++w) window[w] = row(request.rows + w - kept);
    turn_back(slot, window, channels, kept);
  }

  // [channels, kept] to and from rows of channels; a number of rows that is known becomes shuffles.
  static void turn(T* __restrict to, const T* __restrict from, int64_t channels, int64_t kept) {
    if (TAPS) kept = TAPS - 1;
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t w = 0; w < kept; ++w) to[w * BLOCK + c] = from[c * kept + w];
  }

  static void turn_back(T* __restrict to, const T* const* from, int64_t channels, int64_t kept) {
    if (TAPS == 4) {
      const T *__restrict a = from[0], *__restrict b = from[1], *__restrict c = from[2];
      for (int64_t i = 0; i < channels; ++i) to[i * 3] = a[i], to[i * 3 + 1] = b[i], to[i * 3 + 2] = c[i];
      return;
    }
    for (int64_t w = 0; w < kept; ++w)
      for (int64_t c = 0; c < channels; ++c) to[c * kept + w] = from[w][c];
  }

  vf convolve(const T* const* window, int64_t c, const float* weight, const float* bias) const {
    vf sum = load(bias + c);
    for (int64_t w = 0; w < (TAPS ? TAPS : taps_); ++w) sum += load(weight + w * BLOCK + c) * load(window[w] + c);
    return call_.flag ? sum / (1.f + exp2_any(sum * -LOG2E)) : sum;
  }

  // Fewer than W channels: behind them lies another row, or nothing.
  void finish(const T* const* window, int64_t c, int64_t n, const float* weight, const float* bias, T* output) const {
    vf sum = load(bias + c);
    for (int64_t w = 0; w < (TAPS ? TAPS : taps_); ++w) {
      alignas(64) float row[W];
      widen(row, window[w] + c, n);
      sum += load(weight + w * BLOCK + c) * load(row);
    }
    alignas(64) float result[W];
    store(result, call_.flag ? sum / (1.f + exp2_any(sum * -LOG2E)) : sum);
    narrow(output + c, result, n);
  }

  const Call& call_;
  const int64_t taps_, block_;
};

}  // namespace
