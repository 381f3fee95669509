// The tile kernel: lanes run along the query vectors, keys and values are copied tile by tile (prefill). Products of pairs
// go through matrix units where there are any: words of keys and pairs of keys are then whole products, 0 behind their end.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "ragged_attention_layout.h"
#include "ragged_attention_matrix.h"

namespace {

template <typename T, typename S> class TileKernel : public Layout<T, S> {
  using Base = Layout<T, S>;
  using Base::call_, Base::width_, Base::PAIRS, Base::INT8, Base::first_seen, Base::last_seen, Base::position,
      Base::biased, Base::slope, Base::distances_of, Base::at_distance,
      Base::query_vector, Base::locate, Base::read_scales, Base::base2, Base::value_row_size;

 public:
  explicit TileKernel(const Call& call) : Base(call), units_(PAIRS && call.matrix_unit && has_matrix_unit()) {}

  int64_t scratch(int64_t lanes) const {
    return lanes * words() + TILE_KEYS * (lanes + words() + width_ + 2) + 7 * lanes;
  }

  void attend(const Item& item, State state, float* memory) const {
    Tile tile;
    tile.lanes = padded(item.vectors);
    tile.query = memory;
    tile.scores = tile.query + tile.lanes * words();
    tile.values = tile.scores + TILE_KEYS * tile.lanes;
    tile.factor = tile.values + TILE_KEYS * width_;
    tile.first = reinterpret_cast<int32_t*>(tile.factor + tile.lanes);
    tile.last = tile.first + tile.lanes;
    tile.own = tile.last + tile.lanes;
    tile.slopes = reinterpret_cast<float*>(tile.own + tile.lanes);
    tile.distances = reinterpret_cast<const float**>(tile.slopes + tile.lanes);
    tile.key_scales = tile.slopes + 3 * tile.lanes;
    tile.value_scales = tile.key_scales + TILE_KEYS;
    tile.keys = tile.value_scales + TILE_KEYS;
    std::optional<MatrixUnit> unit;
    if (units_) unit.emplace();
    pack_query(item, tile);
    for (int64_t m = 0; m < tile.lanes; ++m) {
      int64_t vector = std::min<int64_t>(m, item.vectors - 1), at = position(item.request, item.vector + vector);
      tile.first[m] = int32_t(first_seen(at));
      tile.last[m] = int32_t(last_seen(item.request, at));
      tile.own[m] = int32_t(at);
      if (biased()) tile.slopes[m] = slope(item, vector), tile.distances[m] = distances_of(item, vector);
    }
    const int64_t last = item.last_key + 1;
    for (int64_t begin = item.first_key, end; begin < last; begin = end) {
      end = std::min<int64_t>(last, begin / TILE_KEYS * TILE_KEYS + TILE_KEYS);
      const S *keys[TILE_KEYS], *values[TILE_KEYS];
      locate(item, begin, end, keys, values);
      pack_keys(keys, end - begin, tile);
      if (units_) score_tiles(tile.scores, tile.keys, tile.query, tile.lanes, end - begin, words());
      else score(end - begin, tile);
      read_scales(tile.key_scales, keys, end - begin, call_.size);
      read_scales(tile.value_scales, values, end - begin, value_row_size());
      if (biased()) soften<true>(begin, end - begin, tile, state);
      else soften<false>(begin, end - begin, tile, state);
      pack_values(values, end - begin, tile);
      if (units_) weigh_tiles(state.sums, tile.factor, tile.scores, tile.values, tile.lanes, width_, end - begin);
      else weigh(end - begin, tile, state);
    }
  }

 private:
  // Words of 4 bytes of a query vector or key: floats, or pairs of bfloat16.
  int64_t words() const {
    const int64_t words = PAIRS ? (call_.size + 1) / 2 : call_.size;
    return units_ ? round_up(words, W) : words;
  }

  struct Tile {
    float* query;       // [panel][words][lanes of the panel]
    float* keys;        // [TILE_KEYS][words]
    float* values;      // [TILE_KEYS][Dvp]; pairs: [TILE_KEYS / 2][Dvp]
    float* scores;      // [TILE_KEYS][lanes], later the weights; pairs: [TILE_KEYS / 2][lanes]
    float* factor;      // [lanes]
    int32_t *first, *last, *own;  // [lanes] positions that a vector sees, and its own
    float* slopes;      // [lanes]
    const float** distances;  // [lanes]
    float *key_scales, *value_scales;  // [TILE_KEYS], of int8
    int64_t lanes;
  };

  void pack_query(const Item& item, const Tile& tile) const {
    std::fill(tile.query, tile.query + tile.lanes * words(), 0.f);
    for (int64_t m = 0; m < item.vectors; ++m) {
      int64_t panel = m / (PANEL * W), panel_lanes = std::min<int64_t>(PANEL * W, tile.lanes - panel * PANEL * W);
      char* to = reinterpret_cast<char*>(tile.query + panel * PANEL * W * words() + m % (PANEL * W));
      const T* from = query_vector(item, m);
      for (int64_t d = 0; d < call_.size; ++d) {
        if constexpr (PAIRS) std::memcpy(to + (d / 2 * panel_lanes) * 4 + d % 2 * 2, from + d, 2);
        else if constexpr (std::is_same_v<T, float>) std::memcpy(to + d * panel_lanes * 4, from + d, 4);
        else {
          T one[W] = {from[d]};
          float value = load(one)[0];
          std::memcpy(to + d * panel_lanes * 4, &value, 4);
        }
      }
    }
  }

  // score runs over up to 11 keys more than there are: whatever lies there, their scores are not looked at.
  void pack_keys(const S** keys, int64_t count, const Tile& tile) const {
    for (int64_t i = 0; i < count; ++i) {
      float* to = tile.keys + i * words();
      if constexpr (PAIRS) {
        std::fill(to + call_.size / 2, to + words(), 0.f);
        if constexpr (INT8) pack_pairs(to, keys[i]);
        else std::memcpy(to, keys[i], call_.size * sizeof(T));
      } else {
        int64_t d = 0;
        for (; d + W <= call_.size; d += W) store(to + d, load(keys[i] + d));
        if (d < call_.size) {
          float wide[W];
          store(wide, load_some(keys[i] + d, call_.size - d));
          std::memcpy(to + d, wide, (call_.size - d) * 4);
        }
      }
    }
  }

  // An int8 has no more digits than a bfloat16: the upper half of the float is all of it.
  void pack_pairs(float* to, const S* key) const {
    for (int64_t d = 0; d < call_.size; d += W) {
      const int64_t count = std::min<int64_t>(W, call_.size - d);
      vh half = __builtin_convertvector((vu)load_some(key + d, count) >> 16, vh);
      std::memcpy(reinterpret_cast<char*>(to) + d * 2, &half, count * 2);
    }
  }

  void pack_values(const S** values, int64_t count, const Tile& tile) const {
    if constexpr (PAIRS) {
      for (int64_t i = 0; i < count; i += 2) {
        const S *even = values[i], *odd = i + 1 < count ? values[i + 1] : nullptr;
        float* to = tile.values + i / 2 * width_;
        for (int64_t d = 0; d < call_.value_size; d += W) {
          vf low = load_some(even + d, call_.value_size - d), high = odd ? load_some(odd + d, call_.value_size - d) : vf{};
          store(to + d, (vf)((vu)low >> 16 | (vu)high));
        }
      }
      if (units_) {
        const int64_t pairs = (count + 1) / 2, whole = round_up(pairs, W);
        std::fill(tile.values + pairs * width_, tile.values + whole * width_, 0.f);
        std::fill(tile.scores + pairs * tile.lanes, tile.scores + whole * tile.lanes, 0.f);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) widen(tile.values + i * width_, values[i], call_.value_size);
    }
  }

  static vf load_some(const S* from, int64_t count) {
    if (count >= W) return load(from);
    S some[W] = {};
    std::memcpy(static_cast<void*>(some), from, count * sizeof(S));
    return load(some);
  }

  void score(int64_t count, const Tile& tile) const {
    for (int64_t lane = 0; lane < tile.lanes; lane += PANEL * W) {
      const float* query = tile.query + lane * words();
      float* scores = tile.scores + lane;
      switch (std::min<int64_t>(PANEL, (tile.lanes - lane) / W)) {
        case 1: score_panel<1>(query, count, tile, scores); break;
        case 2: score_panel<2>(query, count, tile, scores); break;
        case 3: score_panel<std::min(3, PANEL)>(query, count, tile, scores); break;
        default: score_panel<PANEL>(query, count, tile, scores);
      }
    }
  }

  template <int J> void score_panel(const float* query, int64_t count, const Tile& tile, float* scores) const {
    constexpr int R = std::min(12, ACCUMULATORS / J);  // keys of a register tile
    const int64_t depth = words();
    for (int64_t i = 0; i < count; i += R) {
      const float* keys = tile.keys + i * depth;
      vf sum[R][J] = {};
      for (int64_t d = 0; d < depth; ++d) {
        vf q[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) q[j] = load(query + (d * J + j) * W);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          vf key = splat(keys[r * depth + d]);
#pragma GCC unroll 4
          for (int j = 0; j < J; ++j) sum[r][j] = multiply_add<PAIRS>(sum[r][j], q[j], key);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) store(scores + (i + r) * tile.lanes + j * W, sum[r][j]);
    }
  }

  template <bool BIASED> void soften(int64_t begin, int64_t count, const Tile& tile, State state) const {
    for (int64_t lane = 0; lane < tile.lanes; lane += W) {
      float* scores = tile.scores + lane;
      vi first = read<vi>(tile.first + lane), last = read<vi>(tile.last + lane);
      vf largest_score = load(state.largest + lane), top = largest_score, slopes{};
      vi own{};
      if constexpr (BIASED) slopes = load(tile.slopes + lane), own = read<vi>(tile.own + lane);
      for (int64_t i = 0; i < count; ++i) {
        vi at = splat(int32_t(begin + i));
        vf product = load(scores + i * tile.lanes);
        if constexpr (INT8) product = product * tile.key_scales[i];
        vf biased = base2(product);
        if constexpr (BIASED) {
          biased += slopes * __builtin_convertvector(at - own, vf);
          if (call_.distance_bias) biased += read_distances(tile, lane, begin + i);
        }
        vf score = select((at >= first) & (at <= last), biased, splat(-INFINITY));
        store(scores + i * tile.lanes, score);
        top = larger(score, top);
      }
      vf base = select(top == -INFINITY, vf{}, top), factor = exp2(largest_score - base), sum{};
      for (int64_t i = 0; i < count; i += PAIRS ? 2 : 1) {
        vf p = exp2(load(scores + i * tile.lanes) - base);
        sum += p;
        if constexpr (PAIRS) {
          vf odd = i + 1 < count ? exp2(load(scores + (i + 1) * tile.lanes) - base) : vf{};
          sum += odd;
          if constexpr (INT8) {
            p = p * tile.value_scales[i];
            if (i + 1 < count) odd = odd * tile.value_scales[i + 1];
          }
          store(scores + i / 2 * tile.lanes, make_pairs(p, odd));
        } else {
          if constexpr (INT8) p = p * tile.value_scales[i];
          store(scores + i * tile.lanes, p);
        }
      }
      store(state.largest + lane, top);
      store(state.weight + lane, load(state.weight + lane) * factor + sum);
      store(tile.factor + lane, factor);
    }
  }

  // What is added to the scores of the key at a position, for the vectors from a lane on.
  vf read_distances(const Tile& tile, int64_t lane, int64_t at) const {
    alignas(64) float read[W];
    for (int m = 0; m < W; ++m) read[m] = at_distance(tile.distances[lane + m], tile.own[lane + m] - at);
    return load(read);
  }

  void weigh(int64_t count, const Tile& tile, State state) const {
    constexpr int R = W == 16 ? 8 : 4, J = 3;  // 24 or 12 accumulators
    int64_t keys = PAIRS ? (count + 1) / 2 : count;
    for (int64_t d = 0; d < width_; d += J * W)
      for (int64_t m = 0; m < tile.lanes; m += R)
        switch (std::min<int64_t>(J, (width_ - d) / W)) {
          case 1: weigh_registers<R, 1>(keys, tile, state, m, d); break;
          case 2: weigh_registers<R, 2>(keys, tile, state, m, d); break;
          default: weigh_registers<R, J>(keys, tile, state, m, d);
        }
  }

  template <int R, int J> void weigh_registers(int64_t keys, const Tile& tile, State state, int64_t m, int64_t d) const {
    float* sums = state.sums + m * width_ + d;
    const float *weights = tile.scores + m, *values = tile.values + d;
    vf sum[R][J];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int j = 0; j < J; ++j) sum[r][j] = load(sums + r * width_ + j * W) * tile.factor[m + r];
    for (int64_t i = 0; i < keys; ++i, weights += tile.lanes, values += width_) {
      vf value[J];
#pragma GCC unroll 3
      for (int j = 0; j < J; ++j) value[j] = load(values + j * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        vf weight = splat(weights[r]);
#pragma GCC unroll 3
        for (int j = 0; j < J; ++j) sum[r][j] = multiply_add<PAIRS>(sum[r][j], weight, value[j]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int j = 0; j < J; ++j) store(sums + r * width_ + j * W, sum[r][j]);
  }

  const bool units_;
};

}  // namespace
