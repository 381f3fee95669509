// The few kernel: fewer than W query vectors. Lanes run along the head, keys and values stream from memory (decode).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ragged_attention_layout.h"

namespace {

template <typename T, typename S> class FewKernel : public Layout<T, S> {
  using Base = Layout<T, S>;
  using Base::call_, Base::depth_, Base::width_, Base::PAIRS, Base::INT8, Base::first_seen, Base::position,
      Base::slope, Base::query_vector, Base::locate, Base::read_scales, Base::base2;

 public:
  using Base::Base;

  int64_t scratch(int64_t vectors) const {
    return vectors * (depth_ + FEW_KEYS) + FEW_KEYS * std::max(depth_, width_);
  }

  void attend(const Item& item, State state, float* memory) const {
    const int64_t vectors = item.vectors, last = item.last_key + 1;
    float *query = memory, *scores = query + vectors * depth_, *copies = scores + vectors * FEW_KEYS;
    alignas(64) float factor[W], slopes[W];
    Scales scales;
    alignas(64) int32_t bounds[2][W];
    for (int64_t m = 0; m < vectors; ++m) {
      if (direct_pairs()) std::memcpy(query + m * depth_, query_vector(item, m), call_.size * sizeof(T));
      else widen(query + m * depth_, query_vector(item, m), call_.size);
      int64_t at = position(item.request, item.vector + m);
      bounds[0][m] = int32_t(first_seen(at));
      bounds[1][m] = int32_t(at);
      if (call_.slopes) slopes[m] = slope(item, m);
    }
    const S *keys[2][FEW_KEYS], *values[2][FEW_KEYS];
    // Tiles start at multiples of FEW_KEYS; what lies before the first or behind the last key is never located.
    int64_t begin = item.first_key, end = std::min<int64_t>(last, begin / FEW_KEYS * FEW_KEYS + FEW_KEYS);
    locate(item, begin, end, keys[0], values[0]);
    for (int turn = 0; begin < last; turn ^= 1) {
      int64_t next = std::min<int64_t>(last, end + FEW_KEYS), count = end - begin, ahead = next - end;
      const S **next_keys = keys[turn ^ 1], **next_values = values[turn ^ 1];
      locate(item, end, next, next_keys, next_values);
      for (int64_t i = ahead; i < FEW_KEYS; ++i) next_keys[i] = keys[turn][0];  // something to prefetch, already near
      for (int64_t i = count; i < round_up(count, 4); ++i) values[turn][i] = values[turn][count - 1];
      score(query, keys[turn], values[turn], count, vectors, scores, copies);
      read_scales(scales.keys, keys[turn], count, call_.size);  // now that they are near
      read_scales(scales.values, values[turn], count, call_.value_size);
      if (call_.slopes) soften<true>(scores, scales, begin, count, vectors, bounds, slopes, state, factor);
      else soften<false>(scores, scales, begin, count, vectors, bounds, slopes, state, factor);
      weigh(scores, factor, values[turn], next_keys, count, vectors, state.sums, copies);
      begin = end;
      end = next;
    }
  }

 private:
  struct Scales { alignas(64) float keys[FEW_KEYS], values[FEW_KEYS]; };  // of int8

  // Keys that are read where they lie, as pairs of bfloat16, as floats or as int8; others are copied, as are those that
  // would be widened more than once.
  bool direct_pairs() const { return PAIRS && !INT8 && call_.size % (2 * W) == 0; }
  bool direct_keys() const { return std::is_same_v<S, float> && call_.size % W == 0; }
  bool direct_int8(int64_t vectors) const { return INT8 && call_.size % W == 0 && vectors <= 4; }

  // scores[m][i] = query m . key i, for i < count; the rest is arbitrary. Values are prefetched line by line meanwhile:
  // blocks lie anywhere, so that the hardware's prefetcher finds no stream, and a burst of prefetches stalls the core.
  void score(const float* query, const S** keys, const S** values, int64_t count, int64_t vectors, float* scores,
                 float* copies) const {
    const int64_t padded_count = round_up(count, 4);  // a tail of less than four keys repeats the last one
    if (direct_int8(vectors)) {
      const S* rows[FEW_KEYS];
      for (int64_t i = 0; i < padded_count; ++i) rows[i] = keys[std::min(i, count - 1)];
      return score_rows(query, rows, values, count, vectors, scores);
    }
    const float* rows[FEW_KEYS];
    bool direct = direct_keys() || direct_pairs();
    for (int64_t i = 0; i < count; ++i)
      if (!direct) widen(copies + i * depth_, keys[i], call_.size);
    for (int64_t i = 0; i < padded_count; ++i) {
      int64_t from = std::min(i, count - 1);
      rows[i] = direct ? reinterpret_cast<const float*>(keys[from]) : copies + from * depth_;
    }
    score_rows(query, rows, values, count, vectors, scores);
  }

  template <typename R>
  void score_rows(const float* query, const R** rows, const S** values, int64_t count, int64_t vectors,
                  float* scores) const {
    for (int64_t i = 0; i < count; i += 4)
      for (int64_t m = 0; m < vectors; m += 4) {
        const float* q = query + m * depth_;
        float* to = scores + m * FEW_KEYS + i;
        switch (std::min<int64_t>(4, vectors - m)) {
          case 1: score_registers<1>(q, rows + i, values + i, to); break;
          case 2: score_registers<2>(q, rows + i, values + i, to); break;
          case 3: score_registers<3>(q, rows + i, values + i, to); break;
          default: score_registers<4>(q, rows + i, values + i, to);
        }
      }
  }

  template <int M, typename R>
  void score_registers(const float* query, const R** rows, const S** ahead, float* scores) const {
    if constexpr (std::is_same_v<R, float>)
      if (direct_pairs()) return score_registers<M, PAIRS>(query, rows, ahead, scores, call_.size / 2);
    score_registers<M, false>(query, rows, ahead, scores, depth_);
  }

  template <int M, bool PAIR_DOTS, typename R>
  void score_registers(const float* query, const R** rows, const S** ahead, float* scores, int64_t words) const {
    const R *k0 = rows[0], *k1 = rows[1], *k2 = rows[2], *k3 = rows[3];
    const S *v0 = ahead[0], *v1 = ahead[1], *v2 = ahead[2], *v3 = ahead[3];
    constexpr int64_t STEP = PAIR_DOTS ? 2 : 1;  // values in a word
    vf sum[M][4] = {};
    for (int64_t d = 0; d < words; d += W) {
      vf key[4] = {load(k0 + d), load(k1 + d), load(k2 + d), load(k3 + d)};
      if (!INT8 || d % 64 == 0) {  // a line of int8 lasts for several turns
        __builtin_prefetch(v0 + d * STEP);
        __builtin_prefetch(v1 + d * STEP);
        __builtin_prefetch(v2 + d * STEP);
        __builtin_prefetch(v3 + d * STEP);
      }
      if (M > 1)
        for (vf& k : key) pin(k);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        vf q = load(query + m * depth_ + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[m][i] = multiply_add<PAIR_DOTS>(sum[m][i], q, key[i]);
      }
    }
    if (INT8) __builtin_prefetch(v3 + call_.value_size);  // its scale; those of the others lie where the next row begins
    for (int m = 0; m < M; ++m) sum4(scores + m * FEW_KEYS, sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
  }

  // Turns the dot products at positions begin, ... into weights; factor[m]: what the sums so far are multiplied by.
  template <bool SLOPED>
  void soften(float* scores, const Scales& scales, int64_t begin, int64_t count, int64_t vectors, const int32_t (*bounds)[W],
                  const float* slopes, State state, float* factor) const {
    alignas(64) float top[W], sum[W];
    store(top, splat(-INFINITY));
    for (int64_t m = 0; m < vectors; ++m) {
      vi first = splat(bounds[0][m]), last = splat(std::min(bounds[1][m], int32_t(begin + count - 1)));
      vf best = splat(-INFINITY);
      for (int64_t i = 0; i < count; i += W) {
        vi at = lanes() + int32_t(begin + i);
        float* score = scores + m * FEW_KEYS + i;
        vf product = load(score);
        if constexpr (INT8) product = product * load(scales.keys + i);
        vf biased = base2(product);
        if constexpr (SLOPED) biased += slopes[m] * __builtin_convertvector(at - bounds[1][m], vf);
        vf kept = select((at >= first) & (at <= last), biased, splat(-INFINITY));
        store(score, kept);
        best = larger(kept, best);
      }
      top[m] = largest(best);
    }
    vf before = load(state.largest), now = larger(before, load(top)), base = select(now == -INFINITY, vf{}, now);
    store(state.largest, now);
    store(top, base);
    store(factor, exp2(before - base));
    store(sum, vf{});
    for (int64_t m = 0; m < vectors; ++m) {
      vf weights{};
      for (int64_t i = 0; i < count; i += W) {
        float* score = scores + m * FEW_KEYS + i;
        vf p = exp2(load(score) - top[m]);
        weights += p;
        if constexpr (INT8) p = p * load(scales.values + i);
        store(score, p);
      }
      sum[m] = total(weights);
    }
    store(state.weight, load(state.weight) * load(factor) + load(sum));
  }

  // sums[m] = sums[m] * factor[m] + sum over i of weights[m][i] * value i
  void weigh(const float* weights, const float* factor, const S** values, const S** ahead, int64_t count,
                 int64_t vectors, float* sums, float* copies) const {
    if (call_.value_size % W == 0 && (std::is_same_v<S, float> || vectors <= 4))
      return weigh_rows(weights, factor, values, ahead, count, vectors, sums);
    const float* rows[FEW_KEYS];
    for (int64_t i = 0; i < count; ++i) {
      rows[i] = copies + i * width_;
      widen(copies + i * width_, values[i], call_.value_size);
    }
    weigh_rows(weights, factor, rows, ahead, count, vectors, sums);
  }

  template <typename R>
  void weigh_rows(const float* weights, const float* factor, const R** rows, const S** ahead, int64_t count,
                      int64_t vectors, float* sums) const {
    for (int64_t m = 0; m < vectors; m += 4) {
      const float* w = weights + m * FEW_KEYS;
      float* to = sums + m * width_;
      switch (std::min<int64_t>(4, vectors - m)) {
        case 1: weigh_vectors<1>(w, factor + m, rows, ahead, count, to); break;
        case 2: weigh_vectors<2>(w, factor + m, rows, ahead, count, to); break;
        case 3: weigh_vectors<3>(w, factor + m, rows, ahead, count, to); break;
        default: weigh_vectors<4>(w, factor + m, rows, ahead, count, to);
      }
    }
  }

  template <int M, typename R>
  void weigh_vectors(const float* weights, const float* factor, const R** rows, const S** ahead, int64_t count,
                         float* sums) const {
    constexpr int J = 4;
    int64_t d = 0;
    for (; d + J * W <= width_; d += J * W) weigh_registers<M, J>(weights, factor, rows, ahead, count, sums, d);
    for (; d < width_; d += W) weigh_registers<M, 1>(weights, factor, rows, ahead, count, sums, d);
  }

  template <int M, int J, typename R>
  void weigh_registers(const float* weights, const float* factor, const R** rows, const S** ahead, int64_t count,
                           float* sums, int64_t d) const {
    vf sum[M][J];
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < J; ++j) sum[m][j] = load(sums + m * width_ + d + j * W) * factor[m];
    for (int64_t i = 0; i < count; ++i) {
      const R* row = rows[i] + d;
      for (int line = 0; line < J * W * int(sizeof(S)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(ahead[i] + d) + line);
      if (INT8 && d == 0) __builtin_prefetch(ahead[i] + call_.size);  // the scale
      vf value[J];
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) value[j] = load(row + j * W);
      if (M > 1)
        for (vf& v : value) pin(v);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        vf w = splat(weights[m * FEW_KEYS + i]);
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) sum[m][j] += w * value[j];
      }
    }
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < J; ++j) store(sums + m * width_ + d + j * W, sum[m][j]);
  }
};

}  // namespace
