// A few rows of x against weights: lanes run along K.

#pragma once

#include "linear_call.h"
#include "linear_words_cpu.h"

namespace {

// dot against broadcast, 1 thread of a Zen 5 core (48 KB of L1), time in units of a plain read of the weight:
//   x of 12 KB and less   M = 3: 1.2 against 1.5-1.6   M = 5: 1.3 against 1.7   M = 8: 1.14 against 1.6 (bfloat16)
//   x of 20 KB and more   M = 4: 1.3 against 1.7       M = 5: 1.4 against 1.7   M = 8: 1.6-2.4 against 1.6-1.9
constexpr int MAX_DOT_ROWS = 8, SURE_DOT_ROWS = 5;
constexpr int64_t MAX_DOT_BYTES = 16 * 1024;
// How far ahead dot prefetches; 4, 16 and 32 KB were within 3 % of it. Without: 1.2 to 2 times slower from M = 4 on.
constexpr int64_t PREFETCH_BYTES = 8 * 1024;

template <class T>
inline void store_one(const Part& p, int64_t row, int64_t column, float value) {
    if (p.scales) value *= p.scales[column];
    if (p.bias) value += T::widen(p.bias + column * T::size);
    Floats lanes = {value};
    char whole[W * 4];
    T::store(whole, lanes);
    std::memcpy(p.y + (row * p.n + column) * T::size, whole, T::size);
}

// Weight rows n .. n + W / ROWS (those from `end` on repeat the last one) against ROWS rows of x.
template <class T, class Weight, int ROWS>
void dot_tile(const Call& p, const Part& part, int64_t n, int64_t end) {
    constexpr int COLUMNS = W / ROWS;
    constexpr int64_t NUMBERS = W * 4 / T::size, READ = NUMBERS * Weight::size;  // of a vector; bytes of its weight
    const int64_t bytes = p.k * T::size, weight_bytes = p.k * Weight::size;
    const char* weight[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) weight[c] = part.weight + std::min(n + c, end - 1) * weight_bytes;
    const char* x = p.x;
    // The rows of a tile are neighbours, so that tiles are read as one stream: prefetched so, it runs up to 1.3 times
    // faster than with each row prefetched for itself.
    const int64_t tile = COLUMNS * weight_bytes;
    const char* ahead = part.weight + n * weight_bytes + (PREFETCH_BYTES + tile - 1) / tile * tile;
    Floats sums[W] = {};
    int64_t at = 0, read = 0;
    for (; at + W * 4 <= bytes; at += W * 4, read += READ) {
        Words vectors[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) vectors[r] = load(x + r * bytes + at);
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; ++c) {
            if (read % LINE == 0) __builtin_prefetch(ahead + read * COLUMNS + c * LINE);
            const Words word = Weight::words(weight[c] + read);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r)
                sums[r * COLUMNS + c] = T::multiply_add(sums[r * COLUMNS + c], vectors[r], word);
        }
    }
    if (at < bytes) {
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; ++c) {
            const Words word = Weight::words(weight[c] + read, (bytes - at) / T::size);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                Floats& sum = sums[r * COLUMNS + c];
                sum = T::multiply_add(sum, load_part(x + r * bytes + at, bytes - at), word);
            }
        }
    }
    const Floats total = sum_lanes(sums);
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS && n + c < end; ++c) store_one<T>(part, r, n + c, total[r * COLUMNS + c]);
}

template <class T, class Weight, int ROWS>
void dot_range(const Call& p, const Part& part, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += W / ROWS) dot_tile<T, Weight, ROWS>(p, part, n, end);
}

template <class T, class Weight, int... R>
void dot(const Call& p, std::integer_sequence<int, R...>) {
    using Range = void (*)(const Call&, const Part&, int64_t, int64_t);
    static constexpr Range ranges[] = {dot_range<T, Weight, R + 1>...};
    const Range range = ranges[p.m - 1];
    const Tiles tiles(p, W);
    const int64_t units = tiles.count(), share = share_units(p, units), items = (units + share - 1) / share;
    const int64_t threads = team_size(p, items);
    Shares shares(items, threads);
    run_team(p, threads, [&](int64_t part) {
        shares.take(part, [&](int64_t item, int64_t) {
            tiles.take(item * share, (item + 1) * share, 0, [&](const Part& part, int64_t begin, int64_t end, int64_t) {
                range(p, part, begin * W, std::min(part.n, end * W));
            });
        });
    });
}

}  // namespace
