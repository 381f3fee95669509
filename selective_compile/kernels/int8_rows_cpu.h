// Keys and values kept as int8: the numbers of a row, zeros up to a multiple of 4 of them, and the row's scale.
// selective_compile/int8_rows.py is the definition; the bytes are the same.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "threads_cpu.h"
#include "vectors_cpu.h"

namespace {

inline int64_t scale_at(int64_t size) { return round_up(size, 4); }

inline float scale_of(const int8_t* row, int64_t size) { return read<float>(row + scale_at(size)); }

// Bits of a magnitude are in the order of the magnitudes, with NaN above infinity: a row that has one gets it as its scale.
inline float largest_magnitude(const float* from, int64_t size) {
  vi top{};
  for (int64_t d = 0; d < size; d += W) {
    vi magnitude = read<vi>(from + d) & 0x7fffffff, above = magnitude > top;
    top = (magnitude & above) | (top & ~above);
  }
  int32_t bits = 0;
  for (int lane = 0; lane < W; ++lane) bits = std::max(bits, int32_t(top[lane]));
  return read<float>(&bits);
}

// from: floats, then zeros up to a multiple of W.
inline void quantise(int8_t* to, const float* from, int64_t size) {
  const float scale = largest_magnitude(from, size) / 127;
  const bool usable = scale > 0 && scale < INFINITY;
  for (int64_t d = 0; d < size; d += W) {
    vf shifted = (usable ? load(from + d) / scale : vf{}) + 12582912.f;  // 1.5 * 2^23: rounds, ties to even
    vi number = (vi)shifted - 0x4b400000, above = number > 127, below = number < -127;
    number = (127 & above) | (-127 & below) | (number & ~(above | below));  // of a subnormal scale, which is coarse
    vb bytes = __builtin_convertvector(number, vb);
    std::memcpy(to + d, &bytes, std::min<int64_t>(W, size - d));
  }
  std::memset(to + size, 0, scale_at(size) - size);
  write(to + scale_at(size), scale);
}

// A row of a key or value as the pool has it: as it is, or as int8.
template <typename S, typename T> void keep(S* to, const T* from, int64_t size) {
  if constexpr (std::is_same_v<S, int8_t>) {
    float* wide = scratch_of_thread.floats(round_up(size, W));
    widen(wide, from, size);
    quantise(to, wide, size);
  } else {
    std::memcpy(static_cast<void*>(to), from, size * sizeof(T));
  }
}

}  // namespace
