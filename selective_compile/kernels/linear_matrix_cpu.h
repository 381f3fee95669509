// More rows of x against weights on a processor with matrix units for bfloat16 (Intel's AMX).
//
// A product takes 16 rows of the weight, 64 bytes of each as they lie there, and 16 words of 16 rows of x, which is what
// a panel has. 2 x 2 of them are summed at a time, in half of the eight registers. The sums are float32, and what is less
// than a normal number counts as 0, as with the AVX-512 instruction (Intel SDM, TDPBF16PS).

#pragma once

#include "linear_packed_cpu.h"
#include "matrix_unit_cpu.h"

namespace {

#if MATRIX_UNIT

template <class Weight_>
struct Matrix {
    using T = BFloat16;
    using Weight = Weight_;
    static constexpr int64_t ROWS = 32, WORDS = 16;
    static constexpr int64_t X_ROWS = 512;
    static constexpr int64_t PASSES = 2;
    static constexpr bool HALVES = false;
    static constexpr int64_t STEP_LINES = ROWS * WORDS * 2 * Weight::size / LINE;  // of the weight, in a step along K
    // Blocks that the first level of the cache holds beside those of x, where more than two pairs of panels read a tile.
    static int64_t depth(int64_t words, int64_t panels) { return panels <= 4 ? words : std::min(words, CHAIN); }

    using Unit = MatrixUnit;

    // Where a row ends within a product, the next one would be read, and what is not finite there, times 0, is a NaN.
    static bool copied(int64_t bytes) { return bytes % 64 != 0; }

    // The lines of the tile to come, fetched into the second level of the cache, as many in each step of each pair of panels.
    class Ahead {
        const char* at;
        const int64_t lines, of_row, to_next_row;
        int64_t left;

    public:
        Ahead(const WeightTile& weight, int64_t words, int64_t pairs)
            : at(weight.ahead), lines(at ? (STEP_LINES + pairs - 1) / pairs : 0),
              of_row((words * 2 * Weight::size + LINE - 1) / LINE), to_next_row(weight.ahead_stride - of_row * LINE),
              left(of_row) {}

        void step() {
            for (int64_t line = 0; line < lines; ++line, at += LINE) {
                if (!left--) at += to_next_row, left = of_row - 1;
                __builtin_prefetch(at, 0, 2);
            }
        }
    };

    static void multiply(const Packed& x, Block block, WeightTile weight, float* sums) {
        const int64_t panel_bytes = block.words * W * 4, stride = x.panels * W * 4;
        const char* packed = x.block(block.first);
        char* to = reinterpret_cast<char*>(sums);
        Ahead ahead(weight, block.words, (x.panels + 1) / 2);
        for (int64_t panel = 0; panel < x.panels; panel += 2, to += 2 * W * 4, packed += 2 * panel_bytes) {
            const char* second = panel + 1 < x.panels ? packed + panel_bytes : nullptr;
            products(packed, second, weight, ahead, block.words, to, stride, block.first > 0);
        }
    }

private:
    // The sums of 32 rows of the weight and one panel or two, [32][16 or 32], `stride` bytes apart, or what is added to them.
    static void products(const char* first, const char* second, const WeightTile& weight, Ahead& ahead,
                         int64_t words, char* to, int64_t stride, bool add) {
        char *const lower = to + 16 * stride;
        // The instructions do not say that they read memory.
        asm volatile("" ::: "memory");
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        if (add) {
            _tile_loadd(0, to, stride);
            _tile_loadd(1, lower, stride);
            if (second) {
                _tile_loadd(2, to + W * 4, stride);
                _tile_loadd(3, lower + W * 4, stride);
            }
        }
        const char *upper_rows = weight.at, *lower_rows = weight.at + 16 * weight.stride;
        for (int64_t at = 0; at < words; at += WORDS, upper_rows += 64, lower_rows += 64, first += 1024) {
            ahead.step();
            _tile_loadd(6, first, 64);
            _tile_loadd(4, upper_rows, weight.stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, lower_rows, weight.stride);
            _tile_dpbf16ps(1, 5, 6);
            if (second) {
                _tile_loadd(7, second, 64);
                second += 1024;
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, to, stride);
        _tile_stored(1, lower, stride);
        if (second) {
            _tile_stored(2, to + W * 4, stride);
            _tile_stored(3, lower + W * 4, stride);
        }
        asm volatile("" ::: "memory");
    }
};

#endif

}  // namespace
