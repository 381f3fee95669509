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

// scores [keys][lanes] of keys [keys][words] and query [words][lanes]; up to 31 keys more, whatever lies there.
inline void score_tiles(float* scores, const float* keys, const float* query, int64_t lanes, int64_t count, int64_t words) {
  const int64_t stride = lanes * 4, key_stride = words * 4;
  asm volatile("" ::: "memory");
  for (int64_t lane = 0; lane < lanes; lane += 2 * W) {
    const bool two = lane + W < lanes;
    for (int64_t i = 0; i < count; i += 2 * W) {
      const float *upper = keys + i * words, *lower = upper + W * words, *left = query + lane, *right = left + W;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t d = 0; d < words; d += W) {
        _tile_loadd(4, upper + d, key_stride);
        _tile_loadd(5, lower + d, key_stride);
        _tile_loadd(6, left + d * lanes, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (two) {
          _tile_loadd(7, right + d * lanes, stride);
          _tile_dpbf16ps(2, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      float *const first = scores + i * lanes + lane, *const second = first + W * lanes;
      _tile_stored(0, first, stride);
      _tile_stored(1, second, stride);
      if (two) {
        _tile_stored(2, first + W, stride);
        _tile_stored(3, second + W, stride);
      }
    }
  }
  asm volatile("" ::: "memory");
}

// sums [lanes][width], times the lane's factor, with what pairs of `count` keys add: weights [pairs][lanes], behind which
// there is room for as much again, and values [pairs][width], both 0 up to a multiple of W pairs.
inline void weigh_tiles(float* sums, const float* factor, float* weights, const float* values, int64_t lanes, int64_t width,
                        int64_t count) {
  const int64_t pairs = round_up((count + 1) / 2, W), stride = width * 4;
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
  asm volatile("" ::: "memory");
  for (int64_t lane = 0; lane < lanes; lane += 2 * W) {
    const bool two_rows = lane + W < lanes;
    const float *upper = turned + lane * pairs, *lower = upper + W * pairs;
    for (int64_t d = 0; d < width; d += 2 * W) {
      const bool two = d + W < width;
      float *const first = sums + lane * width + d, *const second = first + W * width;
      _tile_loadd(0, first, stride);
      if (two_rows) _tile_loadd(1, second, stride);
      if (two) _tile_loadd(2, first + W, stride);
      if (two && two_rows) _tile_loadd(3, second + W, stride);
      for (int64_t pair = 0; pair < pairs; pair += W) {
        const float* const value = values + pair * width + d;
        _tile_loadd(4, upper + pair, pairs * 4);
        _tile_loadd(6, value, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (two) {
          _tile_loadd(7, value + W, stride);
          _tile_dpbf16ps(2, 4, 7);
        }
        if (two_rows) {
          _tile_loadd(5, lower + pair, pairs * 4);
          _tile_dpbf16ps(1, 5, 6);
          if (two) _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, first, stride);
      if (two_rows) _tile_stored(1, second, stride);
      if (two) _tile_stored(2, first + W, stride);
      if (two && two_rows) _tile_stored(3, second + W, stride);
    }
  }
  asm volatile("" ::: "memory");
}

#else

inline void score_tiles(float*, const float*, const float*, int64_t, int64_t, int64_t) {}
inline void weigh_tiles(float*, const float*, float*, const float*, int64_t, int64_t, int64_t) {}

#endif

}  // namespace
