// Philox 4x32-10, from "Parallel random numbers: as easy as 1, 2, 3" (Salmon et al., SC 2011), as `runtime/philox.py`.

#pragma once

#include <cstdint>

namespace {

// In [0, 1), 53 random bits of the counter (index, 0) under the key `seed`.
inline double uniform(uint64_t seed, uint64_t index) {
  uint32_t c[4] = {uint32_t(index), uint32_t(index >> 32), 0, 0}, k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t(c[0]) * 0xD2511F53u, second = uint64_t(c[2]) * 0xCD9E8D57u;
    const uint32_t next[4] = {uint32_t(second >> 32) ^ c[1] ^ k[0], uint32_t(second),
                              uint32_t(first >> 32) ^ c[3] ^ k[1], uint32_t(first)};
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
  }
  return double((uint64_t(c[0]) << 32 | c[1]) >> 11) * 0x1p-53;
}

}  // namespace
