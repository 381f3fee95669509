// The products of the tile kernel by matrix units (`matrix_unit_cpu.h`): scores of keys, and values by weights.
//
// Everything is packed as the kernel has it in any case: keys are rows of words, queries words of lanes, values pairs of
// keys; weights alone, pairs of keys in lanes, are turned into lanes of pairs first.

#pragma once

#include "matrix_unit_cpu.h"
#include "ragged_attention_call.h"
#include "transpose_cpu.h"

namespace {

#if MATRIX_UNIT

inline MatrixRows rows_of(const float* first, bool two, int64_t words) {
  return {(const char*)first, two ? (const char*)(first + W * words) : nullptr, words * 4};
}

inline MatrixLanes lanes_of(const float* first, bool two, int64_t words) {
  return {(const char*)first, two ? (const char*)(first + W) : nullptr, words * 4};
}

// scores [keys][lanes] of keys [keys][words] and query [words][lanes]; up to 31 keys more, whatever lies there.
inline void score_tiles(float* scores, const float* keys, const float* query, int64_t lanes, int64_t count, int64_t words) {
  for (int64_t lane = 0; lane < lanes; lane += 2 * W) {
    const MatrixLanes queries = lanes_of(query + lane, lane + W < lanes, lanes);
    for (int64_t i = 0; i < count; i += 2 * W)
      multiply_rows(rows_of(keys + i * words, true, words), queries, words, scores + i * lanes + lane, lanes * 4, false, [] {});
  }
}

// sums [lanes][width], times the lane's factor, with what pairs of `count` keys add: weights [pairs][lanes], behind which
// there is room for as much again, and values [pairs][width], both 0 up to a multiple of W pairs.
inline void weigh_tiles(float* sums, const float* factor, float* weights, const float* values, int64_t lanes, int64_t width,
                        int64_t count) {
  const int64_t pairs = round_up((count + 1) / 2, W);
  float* const turned = weights + TILE_KEYS / 2 * lanes;  // [lanes][pairs]
  for (int64_t lane = 0; lane < lanes; lane += W)
    for (int64_t pair = 0; pair < pairs; pair += W) {
      vu square[W];
      for (int i = 0; i < W; ++i) square[i] = read<vu>(weights + (pair + i) * lanes + lane);
      transpose<W>(square);
      for (int i = 0; i < W; ++i) write(turned + (lane + i) * pairs + pair, square[i]);
    }
  for (int64_t m = 0; m < lanes; ++m)
    for (int64_t d = 0; d < width; d += W) store(sums + m * width + d, load(sums + m * width + d) * factor[m]);
  for (int64_t lane = 0; lane < lanes; lane += 2 * W) {
    const MatrixRows rows = rows_of(turned + lane * pairs, lane + W < lanes, pairs);
    for (int64_t d = 0; d < width; d += 2 * W)
      multiply_rows(rows, lanes_of(values + d, d + W < width, width), pairs, sums + lane * width + d, width * 4, true, [] {});
  }
}

#else

inline void score_tiles(float*, const float*, const float*, int64_t, int64_t, int64_t) {}
inline void weigh_tiles(float*, const float*, float*, const float*, int64_t, int64_t, int64_t) {}

#endif

}  // namespace
