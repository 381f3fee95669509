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
  using Base::call_, Base::depth_, Base::width_, Base::PAIRS, Base::INT8, Base::first_seen, Base::last_seen, Base::position,
      Base::biased, Base::slope, Base::distances_of, Base::at_distance, Base::query_vector, Base::locate, Base::read_scales, Base::base2, Base::state_of, Base::of_head,
      Base::value_row_size;

 public:
  using Base::Base;

  int64_t scratch(int64_t heads, int64_t vectors) const {
    return vectors * (heads * depth_ + FEW_KEYS) + FEW_KEYS * std::max(depth_, width_) + width_;
  }

  // Heads in the inner loop: their keys lie side by side in a block.
  void attend(const Item& item, const States& states, float* memory) const {
    const int64_t vectors = item.vectors, last = item.last_key + 1;
    float *queries = memory, *scores = queries + item.heads * vectors * depth_, *copies = scores + vectors * FEW_KEYS;
    float* zeros = copies + FEW_KEYS * std::max(depth_, width_);
    std::fill(zeros, zeros + width_, 0.f);
    for (int64_t k = 0; k < item.heads; ++k) read_query(of_head(item, k), queries + k * vectors * depth_);
    alignas(64) float factor[W];
    Biases biases;
    Scales scales;
    alignas(64) int32_t bounds[3][W];  // the first and the last position that a vector sees, and its own
    for (int64_t m = 0; m < vectors; ++m) {
      int64_t at = position(item.request, item.vector + m);
      bounds[0][m] = int32_t(first_seen(at));
      bounds[1][m] = int32_t(last_seen(item.request, at));
      bounds[2][m] = int32_t(at);
    }
    const S *keys[2][FEW_KEYS], *values[2][FEW_KEYS];
    // Tiles start at multiples of FEW_KEYS; what lies before the first or behind the last key is never located.
    Run run{0, item.first_key, std::min<int64_t>(last, item.first_key / FEW_KEYS * FEW_KEYS + FEW_KEYS)}, next;
    locate(item, run.begin, run.end, keys[0], values[0]);
    for (int turn = 0; run.begin < last; run = next, turn ^= 1) {
      if (run.head + 1 < item.heads) next = {run.head + 1, run.begin, run.end};
      else next = {0, run.end, std::min<int64_t>(last, run.end + FEW_KEYS)};
      const int64_t begin = run.begin, count = run.end - begin, ahead = next.end - next.begin;
      const S **next_keys = keys[turn ^ 1], **next_values = values[turn ^ 1];
      locate(of_head(item, next.head), next.begin, next.end, next_keys, next_values);
      for (int64_t i = ahead; i < FEW_KEYS; ++i) next_keys[i] = keys[turn][0];  // something to prefetch, already near
      for (int64_t i = count; i < round_up(count, 4); ++i) values[turn][i] = reinterpret_cast<const S*>(zeros);
      const float* query = queries + run.head * vectors * depth_;
      State state = state_of(states, item, run.head);
      score(query, keys[turn], values[turn], count, vectors, scores, copies);
      read_scales(scales.keys, keys[turn], count, call_.size);  // now that they are near
      read_scales(scales.values, values[turn], count, value_row_size());
      if (biased()) {
        for (int64_t m = 0; m < vectors; ++m) {
          biases.slopes[m] = slope(of_head(item, run.head), m);
          biases.distances[m] = distances_of(of_head(item, run.head), m);
        }
        soften<true>(scores, scales, begin, count, vectors, bounds, biases, state, factor);
      } else {
        soften<false>(scores, scales, begin, count, vectors, bounds, biases, state, factor);
      }
      weigh(scores, factor, values[turn], next_keys, count, vectors, state.sums, copies);
    }
  }

 private:
  struct Run { int64_t head, begin, end; };  // the keys of one head, from the item's first on, in one iteration
  struct Biases { float slopes[W]; const float* distances[W]; };  // of vectors
  struct Scales { alignas(64) float keys[FEW_KEYS], values[FEW_KEYS]; };  // of int8

  void read_query(const Item& item, float* to) const {
    for (int64_t m = 0; m < item.vectors; ++m)
      if (direct_pairs()) std::memcpy(to + m * depth_, query_vector(item, m), call_.size * sizeof(T));
      else widen(to + m * depth_, query_vector(item, m), call_.size);
  }

  // Keys that are read where they lie, as pairs of bfloat16, as floats or as int8; others are copied, as are those that
  // would be widened more than once.
  bool direct_pairs() const { return PAIRS && !INT8 && call_.size % (2 * W) == 0; }
  bool direct_keys() const { return std::is_same_v<S, float> && call_.size % W == 0; }
  bool direct_int8(int64_t vectors) const { return INT8 && call_.size % W == 0 && vectors <= 4; }
  // Values and weights that are multiplied as pairs of bfloat16: those of two neighbouring keys.
  bool paired_values() const { return PAIRS && !INT8 && call_.value_size % W == 0; }

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

  // Into the second level: the first waits for few lines at a time, and 8 KB runs in random order then come at half the
  // rate (measured on Zen 4 with one thread: 8 and 16 GB/s).
  static void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }
  template <int M> static vf held(vf v) { return M > 1 ? pinned(v) : v; }

  template <int M, bool PAIR_DOTS, typename R>
  void score_registers(const float* query, const R** rows, const S** ahead, float* scores, int64_t words) const {
    const R *k0 = rows[0], *k1 = rows[1], *k2 = rows[2], *k3 = rows[3];
    const S *v0 = ahead[0], *v1 = ahead[1], *v2 = ahead[2], *v3 = ahead[3];
    constexpr int64_t STEP = PAIR_DOTS ? 2 : 1;  // values in a word
    vf sum[M][4] = {};
    for (int64_t d = 0; d < words; d += W) {
      vf key[4] = {held<M>(load(k0 + d)), held<M>(load(k1 + d)), held<M>(load(k2 + d)), held<M>(load(k3 + d))};
      if (!INT8 || d % 64 == 0) {  // a line of int8 lasts for several turns
        prefetch(v0 + d * STEP);
        prefetch(v1 + d * STEP);
        prefetch(v2 + d * STEP);
        prefetch(v3 + d * STEP);
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        vf q = load(query + m * depth_ + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[m][i] = multiply_add<PAIR_DOTS>(sum[m][i], q, key[i]);
      }
    }
    if (INT8) prefetch(v3 + call_.value_size);  // its scale; those of the others lie where the next row begins
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) sum4(scores + m * FEW_KEYS, sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
  }

  // Turns the dot products at positions begin, ... into weights; factor[m]: what the sums so far are multiplied by.
  template <bool BIASED>
  void soften(float* scores, const Scales& scales, int64_t begin, int64_t count, int64_t vectors,
              const int32_t (*bounds)[W], const Biases& biases, State state, float* factor) const {
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
        if constexpr (BIASED) {
          biased += biases.slopes[m] * __builtin_convertvector(at - bounds[2][m], vf);
          if (biases.distances[m]) biased += read_distances(biases.distances[m], bounds[2][m] - (begin + i));
        }
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
        if (paired_values()) store_pairs(scores + m * FEW_KEYS + i / 2, p);
        else store(score, p);
      }
      sum[m] = total(weights);
    }
    store(state.weight, load(state.weight) * load(factor) + load(sum));
  }

  // What is added to the scores of W keys, of which the first is so far back.
  vf read_distances(const float* distances, int64_t first) const {
    alignas(64) float read[W];
    for (int lane = 0; lane < W; ++lane) read[lane] = at_distance(distances, first - lane);
    return load(read);
  }

  // sums[m] = sums[m] * factor[m] + sum over i of weights[m][i] * value i
  void weigh(const float* weights, const float* factor, const S** values, const S** ahead, int64_t count,
                 int64_t vectors, float* sums, float* copies) const {
    if constexpr (PAIRS && !INT8)
      if (paired_values()) return weigh_rows<true>(weights, factor, values, ahead, count, vectors, sums);
    if (call_.value_size % W == 0 && (std::is_same_v<S, float> || vectors <= 4))
      return weigh_rows<false>(weights, factor, values, ahead, count, vectors, sums);
    const float* rows[FEW_KEYS];
    for (int64_t i = 0; i < count; ++i) {
      rows[i] = copies + i * width_;
      widen(copies + i * width_, values[i], call_.value_size);
    }
    weigh_rows<false>(weights, factor, rows, ahead, count, vectors, sums);
  }

  template <bool PAIR_DOTS, typename R>
  void weigh_rows(const float* weights, const float* factor, const R** rows, const S** ahead, int64_t count,
                      int64_t vectors, float* sums) const {
    for (int64_t m = 0; m < vectors; m += 4) {
      const float* w = weights + m * FEW_KEYS;
      float* to = sums + m * width_;
      switch (std::min<int64_t>(4, vectors - m)) {
        case 1: weigh_vectors<PAIR_DOTS, 1>(w, factor + m, rows, ahead, count, to); break;
        case 2: weigh_vectors<PAIR_DOTS, 2>(w, factor + m, rows, ahead, count, to); break;
        case 3: weigh_vectors<PAIR_DOTS, 3>(w, factor + m, rows, ahead, count, to); break;
        default: weigh_vectors<PAIR_DOTS, 4>(w, factor + m, rows, ahead, count, to);
      }
    }
  }

  template <bool PAIR_DOTS, int M, typename R>
  void weigh_vectors(const float* weights, const float* factor, const R** rows, const S** ahead, int64_t count,
                         float* sums) const {
    constexpr int J = 4;
    int64_t d = 0;
    for (; d + J * W <= width_; d += J * W)
      weigh_registers<PAIR_DOTS, M, J>(weights, factor, rows, ahead, count, sums, d);
    for (; d < width_; d += W) weigh_registers<PAIR_DOTS, M, 1>(weights, factor, rows, ahead, count, sums, d);
  }

  // A last key without a neighbour has a row of zeros as one: rows has one more.
  template <bool PAIR_DOTS, int M, int J, typename R>
  void weigh_registers(const float* weights, const float* factor, const R** rows, const S** ahead, int64_t count,
                           float* sums, int64_t d) const {
    constexpr int64_t STEP = PAIR_DOTS ? 2 : 1;  // keys in a word
    vf sum[M][J];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) sum[m][j] = load(sums + m * width_ + d + j * W) * factor[m];
    for (int64_t i = 0; i < count; i += STEP) {
#pragma GCC unroll 2
      for (int64_t key = i; key < i + STEP; ++key) {
        for (int line = 0; line < J * W * int(sizeof(S)); line += 64)
          prefetch(reinterpret_cast<const char*>(ahead[key] + d) + line);
        if (INT8 && d == 0) prefetch(ahead[key] + call_.size);  // the scale
      }
      vf value[J];
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) {
        if constexpr (PAIR_DOTS) value[j] = held<M>(make_pairs(rows[i] + d + j * W, rows[i + 1] + d + j * W));
        else value[j] = held<M>(load(rows[i] + d + j * W));
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        vf w = splat(weights[m * FEW_KEYS + i / STEP]);
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) sum[m][j] = multiply_add<PAIR_DOTS>(sum[m][j], w, value[j]);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) store(sums + m * width_ + d + j * W, sum[m][j]);
  }
};

}  // namespace
