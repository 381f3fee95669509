// gated_delta_rule: lanes run along Dv; a block of columns of S is a problem of its own.
//
// heads H, groups Hk, size D, value_size Dv, flag: a decay per channel of the key; inputs query, key [T, Hk, D],
// value [T, H, Dv], decay [T, H] or [T, H, D], beta [T, H]; slot [H, D, Dv].
//
// With e = exp(decay), and S as the token finds it: delta = beta * (v - (k e) . S), out = scale * ((q e) . S +
// (q . k) delta), S = e S + k (outer) delta. So one sweep over S writes it for a token and reads it for the next one.

#pragma once

#include "state_call.h"

namespace {

class GatedDeltaRule {
 public:
  static constexpr int64_t VECTORS = 4;  // of columns in a block: eight sums hide the latency of an addition

  explicit GatedDeltaRule(const Call& call) : call_(call), depth_(round_up(call.size, W)) {}

  int64_t blocks() const { return call_.heads * per_head(); }

  void run(int64_t block, const Request* requests, int64_t count) const {
    const int64_t head = block / per_head(), first = block % per_head() * VECTORS * W;
    const int64_t columns = std::min<int64_t>(VECTORS * W, call_.value_size - first);
    switch ((columns + W - 1) / W) {
      case 1: return run<1>(head, first, columns, requests, count);
      case 2: return run<2>(head, first, columns, requests, count);
      case 3: return run<3>(head, first, columns, requests, count);
      default: return run<4>(head, first, columns, requests, count);
    }
  }

 private:
  // What a token brings, each [D]: e, k, k e, q e; and q . k.
  struct Token { float *factor, *key, *decayed_key, *decayed_query, overlap; };

  int64_t per_head() const { return (call_.value_size + VECTORS * W - 1) / (VECTORS * W); }

  template <int N>
  void run(int64_t head, int64_t first, int64_t columns, const Request* requests, int64_t count) const {
    float* copy = scratch_of_thread.floats(call_.size * N * W + 9 * depth_ + N * W);
    float *memory = copy + call_.size * N * W, *value = memory + 9 * depth_;
    const int64_t offset = head * call_.size * call_.value_size + first;
    Token tokens[2];
    for (Token& token : tokens) {
      token = {memory, memory + depth_, memory + 2 * depth_, memory + 3 * depth_, 0.f};
      memory += 4 * depth_;
    }
    for (const Request* request = requests; request < requests + count; ++request) {
      // One row goes through the slot itself, which several rows would have to fetch again and again.
      const bool in_place = !request->fresh && request->rows == 1 && columns == N * W;
      float* state = in_place ? request->after(offset) : copy;
      const int64_t width = in_place ? call_.value_size : N * W;
      if (!in_place) load_state(state, request->before(offset), call_.size, columns, width, call_.value_size);
      vf remembered[N] = {}, answer[N] = {}, delta[N] = {};
      const int64_t end = request->begin + request->rows;
      prepare(request->begin, head, tokens[0], memory);
      sweep<N, false, true>(state, width, tokens[0], delta, tokens[0], remembered, answer);
      for (int64_t t = request->begin; t < end; ++t) {
        const Token &token = tokens[(t - request->begin) % 2], &next = tokens[(t - request->begin + 1) % 2];
        read_row(value, call_.inputs[2], t, head, first, columns);
        const float beta = read_one(call_.inputs[4], t, head), scale = float(call_.scale);
        for (int v = 0; v < N; ++v) {
          delta[v] = (load(value + v * W) - remembered[v]) * beta;
          store(value + v * W, (answer[v] + delta[v] * token.overlap) * scale);
        }
        write_row(call_, (t * call_.heads + head) * call_.value_size + first, value, columns);
        if (t + 1 < end) {
          prepare(t + 1, head, const_cast<Token&>(next), memory);
          sweep<N, true, true>(state, width, token, delta, next, remembered, answer);
        } else if (request->slot) {
          sweep<N, true, false>(state, width, token, delta, token, remembered, answer);
        }
      }
      if (!in_place) keep_state(request->after(offset), state, call_.size, columns, width, call_.value_size);
    }
  }

  void prepare(int64_t t, int64_t head, Token& token, float* query) const {
    const int64_t key_head = head / (call_.heads / call_.groups);
    read_row(query, call_.inputs[0], t, key_head, 0, call_.size);
    read_row(token.key, call_.inputs[1], t, key_head, 0, call_.size);
    if (call_.flag) read_row(token.factor, call_.inputs[3], t, head, 0, call_.size);
    else std::fill(token.factor, token.factor + depth_, read_one(call_.inputs[3], t, head));
    vf overlap = {};
    for (int64_t d = 0; d < depth_; d += W) {
      const vf e = exp2_any(load(token.factor + d) * LOG2E), k = load(token.key + d), q = load(query + d);
      store(token.factor + d, e);
      store(token.decayed_key + d, k * e);
      store(token.decayed_query + d, q * e);
      overlap += q * k;
    }
    token.overlap = total(overlap);
  }

  // WRITE: S = e S + k (outer) delta, of `token`. READ: what `next` finds in it by its key and its query.
  template <int N, bool WRITE, bool READ>
  void sweep(float* state, int64_t width, const Token& token, const vf* delta, const Token& next, vf* remembered,
             vf* answer) const {
    vf by_key[N] = {}, by_query[N] = {};
    for (int64_t d = 0; d < call_.size; ++d, state += width) {
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        vf s = load(state + v * W);
        if (WRITE) {
          s = s * token.factor[d] + delta[v] * token.key[d];
          store(state + v * W, s);
        }
        if (READ) {
          by_key[v] += s * next.decayed_key[d];
          by_query[v] += s * next.decayed_query[d];
        }
      }
    }
    if (!READ) return;
    for (int v = 0; v < N; ++v) remembered[v] = by_key[v], answer[v] = by_query[v];
  }

  const Call& call_;
  const int64_t depth_;
};

}  // namespace
