// Vectors of words turned into vectors of their lanes.

#pragma once

#include <utility>

namespace {

// Lanes whose index has the bit D stay in `b`, the others in `a`; the rest of each moves by D into the other vector. Mask:
// a vector of as many uint32_t.
template <class Mask, int D, class Vector, int... I>
inline void exchange(Vector& a, Vector& b, std::integer_sequence<int, I...>) {
    constexpr int LANES = sizeof...(I);
#if defined(__clang__)
    const Vector low = __builtin_shufflevector(a, b, (I & D ? I - D + LANES : I)...);
    b = __builtin_shufflevector(a, b, (I & D ? I + LANES : I + D)...);
#else
    const Vector low = __builtin_shuffle(a, b, (Mask){(I & D ? I - D + LANES : I)...});
    b = __builtin_shuffle(a, b, (Mask){(I & D ? I + LANES : I + D)...});
#endif
    a = low;
}

// As many vectors of uint32_t as each has lanes.
template <int LANES, int D = LANES / 2, class Vector>
inline void transpose(Vector (&rows)[LANES]) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
        if (!(i & D)) exchange<Vector, D>(rows[i], rows[i + D], std::make_integer_sequence<int, LANES>());
    if constexpr (D > 1) transpose<LANES, D / 2>(rows);
}

}  // namespace
