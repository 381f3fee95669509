// A few rows of x against weights: lanes run along K.

#pragma once

#include "linear_call.h"
#include "linear_words_cpu.h"

namespace {

// Sums that a tile keeps in registers, beside a word of each of its columns and one of x.
constexpr int MAX_SUMS = W == 16 ? 24 : W;
// Rows of x multiplied at once; of more, the weights of a tile are read again, from the cache. 8 rows by 2 columns took
// 1.1 times as long as 4 by 4 twice: the first level of the cache gives a vector a cycle. But with words that have to be
// made of int8 numbers each time, twice took 1.3 times as long.
template <class T, class Weight>
constexpr int MAX_PASS_ROWS = Weight::size < T::size ? std::min(W, 8) : W == 16 ? 6 : 4;
// How far ahead weights are fetched, into the second level of the cache, which awaits more lines at a time than the
// first: fetched into that, as before, M = 1 takes 1.2-1.5 times as long and M = 8 to 12 1.4-1.8 times (bfloat16, two
// threads of a Zen 4). From 8 KB to 32 KB ahead were within 4 % of each other.
constexpr int64_t PREFETCH_BYTES = 16 * 1024;

// Columns of a tile: a power of two, since three took 1.1-1.2 times as long as two or four.
constexpr int tile_columns(int rows) {
    int columns = W;
    while (columns * rows > MAX_SUMS) columns /= 2;
    return columns;
}

// `values` [ROWS][COLUMNS] to y[row ..][n ..], scaled, with the bias; of each row as many as there are columns.
template <class T, int ROWS, int COLUMNS>
inline void store_tile(const Part& p, int64_t row, int64_t n, int64_t columns, float* values) {
    constexpr int COUNT = (ROWS * COLUMNS + W - 1) / W * W;
    if (p.scales)
        for (int c = 0; c < columns; ++c)
            for (int r = 0; r < ROWS; ++r) values[r * COLUMNS + c] *= p.scales[n + c];
    if (p.bias)
        for (int c = 0; c < columns; ++c)
            for (int r = 0; r < ROWS; ++r) values[r * COLUMNS + c] += T::widen(p.bias + (n + c) * T::size);
    char narrow[COUNT * 4];
    for (int i = 0; i < COUNT; i += W) T::store(narrow + i * T::size, (Floats)load((const char*)(values + i)));
    for (int r = 0; r < ROWS; ++r) {
        char* at = p.y + ((row + r) * p.n + n) * T::size;
        const char* from = narrow + r * COLUMNS * T::size;
        columns == COLUMNS ? std::memcpy(at, from, COLUMNS * T::size) : std::memcpy(at, from, columns * T::size);
    }
}

// Of a tile's weights, the lines that one pass over them fetches: COLUMNS with every line of a row.
struct Ahead {
    const char* at;
    int64_t column, step;  // bytes from one to the next, and from those of a line to those of the next
};

// Weight rows n .. n + COLUMNS (those from `end` on repeat the last one) against ROWS rows of x, the first one `row`.
template <class T, class Weight, int ROWS>
void dot_tile(const Call& p, const Part& part, int64_t row, int64_t n, int64_t end, Ahead ahead) {
    constexpr int COLUMNS = tile_columns(ROWS), GROUPS = (ROWS * COLUMNS + W - 1) / W;
    constexpr int64_t NUMBERS = W * 4 / T::size, READ = NUMBERS * Weight::size;  // of a vector; bytes of its weight
    const int64_t bytes = p.k * T::size, weight_bytes = p.k * Weight::size;
    const char* weight[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) weight[c] = part.weight + std::min(n + c, end - 1) * weight_bytes;
    const char* x = p.x + row * bytes;
    Floats sums[GROUPS][W] = {};
    const auto add = [&](const Words (&words)[COLUMNS], auto&& load_x) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const Words vector = load_x(x + r * bytes);
#pragma GCC unroll 16
            for (int c = 0; c < COLUMNS; ++c) {
                Floats& sum = sums[(r * COLUMNS + c) / W][(r * COLUMNS + c) % W];
                sum = T::multiply_add(sum, vector, words[c]);
            }
        }
    };
    int64_t at = 0, read = 0;
    Words words[COLUMNS];
    for (; at + W * 4 <= bytes; at += W * 4, read += READ) {
        const bool next_line = read % LINE == 0;
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; ++c) {
            if (next_line) __builtin_prefetch(ahead.at + c * ahead.column, 0, 2);
            words[c] = Weight::words(weight[c] + read);
        }
        if (next_line) ahead.at += ahead.step;
        add(words, [&](const char* x) { return load(x + at); });
    }
    if (at < bytes) {
        for (int c = 0; c < COLUMNS; ++c) words[c] = Weight::words(weight[c] + read, (bytes - at) / T::size);
        add(words, [&](const char* x) { return load_part(x + at, bytes - at); });
    }
    float total[GROUPS * W];
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g) {
        const Floats sum = sum_lanes(sums[g]);
        std::memcpy(total + g * W, &sum, sizeof sum);
    }
    store_tile<T, ROWS, COLUMNS>(part, row, n, std::min<int64_t>(end - n, COLUMNS), total);
}

template <class T, class Weight>
int64_t dot_passes(const Call& p) {
    return (p.m + MAX_PASS_ROWS<T, Weight> - 1) / MAX_PASS_ROWS<T, Weight>;
}

template <class T, class Weight, int ROWS>
void dot_range(const Call& p, const Part& part, int64_t begin, int64_t end) {
    constexpr int COLUMNS = tile_columns(ROWS);
    // The rows of a tile are neighbours, so that tiles are fetched as one stream: prefetched so, it runs up to 1.3 times
    // faster than with each row prefetched for itself. Each of the passes fetches its part of a tile to come.
    const int64_t passes = dot_passes<T, Weight>(p), line = LINE / passes;
    const int64_t row_bytes = p.k * Weight::size, tile = COLUMNS * row_bytes;
    const int64_t ahead = (PREFETCH_BYTES + tile - 1) / tile * tile, part_of_tile = tile / passes;
    for (int64_t n = begin; n < end; n += COLUMNS)
        for (int64_t pass = 0; pass < passes; ++pass) {
            const char* at = part.weight + n * row_bytes + ahead + pass * part_of_tile;
            const int64_t row = std::min(pass * ROWS, p.m - ROWS);  // the last pass may do rows of the one before again
            dot_tile<T, Weight, ROWS>(p, part, row, n, end, {at, line, line * COLUMNS});
        }
}

using DotRange = void (*)(const Call&, const Part&, int64_t, int64_t);

template <class T, class Weight, int... R>
DotRange dot_range_of(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr DotRange ranges[] = {dot_range<T, Weight, R + 1>...};
    return ranges[rows - 1];
}

// A call of few rows, of which each thread of a team takes a part.
template <class T, class Weight>
class Dots {
    const Call* call;
    DotRange range;
    Tiles tiles;
    Split split;
    Shares shares;

public:
    static int64_t items(const Call& p) { return Split(p, Tiles(p, W).count()).items; }

    Dots(const Call& p, int64_t threads)
        : call(&p), tiles(p, W), split(p, tiles.count()), shares(split.items, threads) {
        const int64_t passes = dot_passes<T, Weight>(p);
        range = dot_range_of<T, Weight>((p.m + passes - 1) / passes, std::make_integer_sequence<int, MAX_PASS_ROWS<T, Weight>>());
    }

    void take(int64_t thread) {
        shares.take(thread, [&](int64_t item, int64_t) {
            tiles.take(item * split.share, (item + 1) * split.share, 0, [&](const Part& part, int64_t begin, int64_t end, int64_t) {
                range(*call, part, begin * W, std::min(part.n, end * W));
            });
        });
    }
};

}  // namespace
