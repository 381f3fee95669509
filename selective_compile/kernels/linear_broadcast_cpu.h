// More rows of x against weights: lanes run along the rows of x, and words of a weight are broadcast to them.

#pragma once

#include "linear_packed_cpu.h"

namespace {

// How much of packed x (by cutting K) a core goes through for every tile: at 512 rows, with 1 MB of L2, 128 rows and 768
// KB take 0.84-0.92 of the time of 512 rows and 384 KB, in both dtypes.
constexpr int64_t PACKED_BYTES = 768 * 1024;
// Half of `low` and half of `high` in one vector, and back.  Not by way of memory: AVX2 takes 8 times as long; and for
// AVX-512, GCC makes two instructions and a constant of the shuffle: 1.6 times as long.
template <int... I>
inline Words joined(Words low, Words high, std::integer_sequence<int, I...>) {
#if defined(__AVX512F__)
    return (Words)_mm512_mask_blend_epi32(0xff00, (__m512i)low, (__m512i)high);
#elif defined(__clang__)
    return __builtin_shufflevector(low, high, (I < W / 2 ? I : I + W)...);
#else
    return __builtin_shuffle(low, high, (Words){(I < W / 2 ? I : I + W)...});
#endif
}
inline Words joined(Words low, Words high) { return joined(low, high, std::make_integer_sequence<int, W>()); }

inline void load_halves(const float* low, const float* high, Floats& both) {
    std::memcpy(&both, low, sizeof both / 2);
    std::memcpy((char*)&both + sizeof both / 2, high, sizeof both / 2);
}

inline void store_halves(const Floats& both, float* low, float* high) {
    std::memcpy(low, &both, sizeof both / 2);
    std::memcpy(high, (const char*)&both + sizeof both / 2, sizeof both / 2);
}

// TILE rows of the weight, `stride` bytes apart, against PANELS panels of x over a chain of `words` words, and half a word
// more if `odd`; adds the chain's sums to (or sets) sums [TILE][panels * W]. `ahead`, if any, is what will be read next,
// `ahead_step` bytes for each word. With HALF, one panel more of half as many rows: it holds them twice, and is multiplied
// by two rows of the weight at once, which takes 0.85-0.90 of the time of a whole one at M = 20 and 24.
template <class T, int PANELS, bool HALF>
void multiply_tile(const char* x, int64_t panel_bytes, const char* weight, int64_t stride, int64_t words, bool odd,
                   const char* ahead, int64_t ahead_step, float* sums, int64_t sums_stride, bool add) {
    static_assert(TILE % 2 == 0);
    Floats total[TILE][PANELS], paired[TILE / 2];
    float* const beyond = sums + PANELS * W;
#pragma GCC unroll 16
    for (int c = 0; c < TILE; ++c)
#pragma GCC unroll 2
        for (int j = 0; j < PANELS; ++j) total[c][j] = Floats{};
#pragma GCC unroll 16
    for (int c = 0; HALF && c < TILE; c += 2) paired[c / 2] = Floats{};
    const auto step = [&](auto word_at) __attribute__((always_inline)) {
        Words vectors[PANELS], twice{}, even{};
#pragma GCC unroll 2
        for (int j = 0; j < PANELS; ++j) vectors[j] = load(x + j * panel_bytes);
        if (HALF) twice = load(x + PANELS * panel_bytes);
        const char* base = weight;
#pragma GCC unroll 16
        for (int c = 0; c < TILE; ++c) {
            const Words word = word_at(base + (c % 3) * stride);
            if (c % 3 == 2) base += 3 * stride;
#pragma GCC unroll 2
            for (int j = 0; j < PANELS; ++j) total[c][j] = T::multiply_add(total[c][j], vectors[j], word);
            if (HALF && c % 2) paired[c / 2] = T::multiply_add(paired[c / 2], twice, joined(even, word));
            even = word;
        }
        x += W * 4;
        weight += 4;
    };
    for (int64_t at = 0; at < words; ++at) {
        // A step reads a word of TILE rows, so this walks once through the next tile, as one stream. A prefetch row by row would
        // fill few cache sets where a row is a multiple of 4096 bytes: 1.25 times slower there at M = 16.
        if (ahead) __builtin_prefetch(ahead + at * ahead_step, 0, 2);
        step(broadcast);
    }
    if (odd) step([](const char* at) {
        uint16_t half;
        std::memcpy(&half, at, 2);
        return uint32_t(half) - Words{};
    });
#pragma GCC unroll 16
    for (int c = 0; c < TILE; ++c)
#pragma GCC unroll 2
        for (int j = 0; j < PANELS; ++j) {
            float* const at = sums + c * sums_stride + j * W;
            if (add) total[c][j] += (Floats)load((const char*)at);
            std::memcpy(at, &total[c][j], sizeof(Floats));
        }
#pragma GCC unroll 16
    for (int c = 0; HALF && c < TILE; c += 2) {
        float *const low = beyond + c * sums_stride, *const high = low + sums_stride;
        Floats before{};
        if (add) load_halves(low, high, before);
        store_halves(paired[c / 2] + before, low, high);
    }
}

template <class T_, class Weight_>
struct Broadcast {
    using T = T_;
    using Weight = Weight_;
    struct Unit {
        Unit() {}
    };
    static constexpr int64_t ROWS = TILE, WORDS = 1;
    // Reading the weight once for so many is hidden behind their arithmetic.
    static constexpr int64_t X_ROWS = 128;
    static constexpr int64_t PASSES = 8;  // bounds the memory for packed x
    static constexpr bool HALVES = true;

    static int64_t depth(int64_t words, int64_t panels) {
        return std::min(words, std::max<int64_t>(1, PACKED_BYTES / (panels * W * 4) / CHAIN) * CHAIN);
    }

    // Rows of a weight so many bytes apart, or a multiple, meet in one set of the L1 cache, 12 of them in as many ways:
    // copied side by side they take 0.71-0.87 of the time at K = 2048 in both dtypes.  At half of it, where two sets are
    // met, copying took 1.0-1.2 times as long.
    static bool copied(int64_t bytes) { return bytes % 4096 == 0; }

    static void multiply(const Packed& x, Block block, WeightTile weight, float* sums) {
        constexpr int64_t AHEAD = ROWS * 4 / T::size * Weight::size;
        for (int64_t panel = 0; panel < x.panels; panel += 2) {
            const bool two = panel + 1 < x.panels, half = two && x.is_half(panel + 1);
            const auto multiply = half ? multiply_tile<T, 1, true>
                                  : two ? multiply_tile<T, 2, false>
                                        : multiply_tile<T, 1, false>;
            for (int64_t chain = 0; chain < block.words; chain += CHAIN) {
                const int64_t bytes = std::min(CHAIN * 4, block.bytes - chain * 4);
                multiply(x.block(block.first) + (panel * block.words + chain) * W * 4, block.words * W * 4,
                         weight.at + chain * 4, weight.stride, bytes / 4, bytes % 4 != 0,
                         weight.ahead ? weight.ahead + chain * AHEAD : nullptr, AHEAD, sums + panel * W, x.panels * W,
                         block.first + chain > 0);
            }
            weight.ahead = nullptr;
        }
    }
};

}  // namespace
