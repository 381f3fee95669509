// More rows of x against weights on a processor with matrix units for bfloat16 (Intel's AMX).
//
// A product takes 16 rows of the weight, 64 bytes of each as they lie there, and 16 words of 16 rows of x, which is what
// a panel has; 2 x 2 of them are summed at a time.

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
    static int64_t depth(int64_t words, int64_t panels) {
        return panels <= 4 ? words : std::min(words, CHAIN);
    }

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
        const int64_t panel_bytes = block.words * W * 4;
        const MatrixRows rows{weight.at, weight.at + ROWS / 2 * weight.stride, weight.stride};
        const char* packed = x.block(block.first);
        Ahead ahead(weight, block.words, (x.panels + 1) / 2);
        for (int64_t panel = 0; panel < x.panels; panel += 2, sums += 2 * W, packed += 2 * panel_bytes) {
            const MatrixLanes lanes{packed, panel + 1 < x.panels ? packed + panel_bytes : nullptr, W * 4};
            multiply_rows(rows, lanes, block.words, sums, x.panels * W * 4, block.first > 0, [&] { ahead.step(); });
        }
    }
};

#endif

}  // namespace
