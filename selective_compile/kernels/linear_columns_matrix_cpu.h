// Weights that lie by columns, [k, n] row-major, on a processor with matrix units for bfloat16 (Intel's AMX).
//
// A product takes 16 rows of x, 64 bytes of each as they lie there, and 16 words of 16 columns, of which a word is two
// neighbours along K: they are put side by side first, a block of K of all columns of an item.

#pragma once

#include "linear_columns_cpu.h"
#include "matrix_unit_cpu.h"

namespace {

#if MATRIX_UNIT

// Words along K of all columns of an item: [panel of 16 columns][word][16 columns].
class Panels {
    static constexpr int64_t STEP = 16;  // words of a product

    const Call& p;
    const Part& part;
    const int64_t begin, end;
    char* const memory;

    // Of `word`, whose numbers are there unless they are behind the end of K.
    void put(int64_t first, int64_t word) const {
        const int64_t row = part.n * 2, at = first + 2 * word;
        const char* from = part.weight + at * row + begin * 2;
        int64_t column = begin, panel = 0;
        const auto to = [&](int64_t of) { return memory + (of * WORDS + word) * W * 4; };
        if (at + 1 < p.k)
            for (; column + 2 * W <= end; column += 2 * W, from += 2 * W * 2, panel += 2) {
                Words two[2];
                words_of_twice<BFloat16>(from, row, two, std::make_integer_sequence<int, 2 * W>());
                std::memcpy(to(panel), &two[0], W * 4);
                std::memcpy(to(panel + 1), &two[1], W * 4);
            }
        for (; column < end; column += W, from += W * 2, ++panel) {
            const int64_t columns = std::min<int64_t>(W, end - column);
            Words words{};
            if (at < p.k) words = words_of_columns<BFloat16, false>(from, row, columns, at + 1 == p.k);
            std::memcpy(to(panel), &words, W * 4);
        }
    }

public:
    static constexpr int64_t WORDS = 128;  // of a block along K
    static int64_t bytes(int64_t columns) { return (columns + W - 1) / W * WORDS * W * 4; }

    Panels(const Call& p, const Part& part, int64_t begin, int64_t end, char* memory)
        : p(p), part(part), begin(begin), end(end), memory(memory) {}

    // Those from number `first` of K on; returns how many words, a multiple of 16: behind the end of K they are 0.
    int64_t fill(int64_t first) const {
        const int64_t there = std::min(WORDS, (p.k - first + 1) / 2), words = (there + STEP - 1) / STEP * STEP;
        for (int64_t word = 0; word < words; ++word) {
            const int64_t row = part.n * 2, ahead = first + 2 * word + ROWS_AHEAD;
            for (int64_t next = ahead; next < std::min(ahead + 2, p.k); ++next)
                for (int64_t line = 0; line < (end - begin) * 2; line += LINE)
                    __builtin_prefetch(part.weight + next * row + begin * 2 + line, 0, 2);
            put(first, word);
        }
        return words;
    }

    MatrixLanes lanes(int64_t panel) const {
        const char* left = memory + panel * WORDS * W * 4;
        return {left, begin + (panel + 1) * W < end ? left + WORDS * W * 4 : nullptr, W * 4};
    }
};

struct ByUnits {
    using T = BFloat16;
    using Unit = MatrixUnit;
    static constexpr int64_t COLUMNS = 64, ROWS = 32;  // of a tile, and of x at once
    static constexpr int64_t COPY = ROWS * Panels::WORDS * 4;

    // Rows of x, numbers from `first` of K on: where they lie, or copied if a product would read what is not theirs.
    static MatrixRows rows_of(const Call& p, int64_t x_row, int64_t rows, int64_t first, int64_t words, char* copy) {
        const int64_t bytes = std::min(words * 4, (p.k - first) * 2);
        const char* from = p.x + (x_row * p.k + first) * 2;
        int64_t stride = p.k * 2;
        if (bytes < words * 4 || (rows % 16 != 0 && rows < ROWS)) {
            std::memset(copy, 0, COPY);
            for (int64_t row = 0; row < std::min(rows, ROWS); ++row)
                std::memcpy(copy + row * Panels::WORDS * 4, from + row * stride, bytes);
            from = copy, stride = Panels::WORDS * 4;
        }
        return {from, rows > 16 ? from + 16 * stride : nullptr, stride};
    }

    static void multiply(const Call& p, const Part& part, int64_t x_row, int64_t rows, int64_t begin, int64_t end) {
        const int64_t stride = (end - begin + W - 1) / W * W, sums_bytes = (rows + 15) / 16 * 16 * stride * 4;
        char* scratch = tile_scratch.at_least(sums_bytes + Panels::bytes(end - begin) + COPY);
        float* sums = reinterpret_cast<float*>(scratch);
        const Panels panels(p, part, begin, end, scratch + sums_bytes);
        char* copy = scratch + sums_bytes + Panels::bytes(end - begin);
        for (int64_t first = 0; first < p.k; first += 2 * Panels::WORDS) {
            const int64_t words = panels.fill(first);
            for (int64_t row = 0; row < rows; row += ROWS) {
                const MatrixRows of_x = rows_of(p, x_row + row, rows - row, first, words, copy);
                for (int64_t panel = 0; panel * W < end - begin; panel += 2)
                    multiply_rows(of_x, panels.lanes(panel), words, sums + row * stride + panel * W, stride * 4, first > 0,
                                  [] {});
            }
        }
        store_columns<T>(p, part, x_row, rows, begin, end, sums, stride);
    }
};

#endif

}  // namespace
