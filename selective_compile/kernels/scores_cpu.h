// Numbers of float32, and of bfloat16 as their bits, as floats.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float value(float score) { return score; }

// A bfloat16 is the upper half of a float32.
inline float value(uint16_t score) {
  const uint32_t bits = uint32_t(score) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

}  // namespace
