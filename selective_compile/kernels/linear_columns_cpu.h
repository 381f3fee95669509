// Weights that lie by columns, [k, n] row-major. A few rows of x are multiplied by them as they lie, lanes running along
// n; for more, some columns at a time are turned into rows, in memory that the second level of the cache holds, and
// multiplied as rows are, in the same order.
//
// A row of k numbers is a page of its own, or several: what is read of it at once is as wide as an item of work, so that
// addresses are translated once for many lines, and the rows to come are fetched, which the processor does not by itself.

#pragma once

#include <algorithm>

#include "linear_call.h"
#include "linear_words_cpu.h"
#include "thread_scratch_cpu.h"

namespace {

// Numbers of K that are summed from 0, before the sums are added to those so far; and how far ahead lines are fetched.
constexpr int64_t ROWS_AHEAD = 64;
constexpr int MAX_COLUMN_ROWS = 4, COLUMN_VECTORS = W == 16 ? 4 : 2;  // of x multiplied at once, and of columns

template <class T>
struct ByColumns {
    static constexpr int64_t size = T::size;
};
template <class Weight> constexpr bool BY_COLUMNS = false;
template <class T> constexpr bool BY_COLUMNS<ByColumns<T>> = true;

// W words along K, vector i holding word i of `columns` columns (W at most; the other lanes are 0); `at` is number 0 of
// the first of them, `left` how many numbers there are along K, and `row` the bytes from one to the next.
template <class T>
inline void load_square(const char* at, int64_t row, int64_t left, int64_t columns, Words (&square)[W]) {
    constexpr int EACH = 4 / T::size;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
        Words word{};
#pragma GCC unroll 2
        for (int half = 0; half < EACH; ++half) {
            if (i * EACH + half >= left) continue;
            const char* from = at + (i * EACH + half) * row;
            if constexpr (T::size == 4) {
                word = columns == W ? load(from) : load_part(from, columns * 4);
            } else {
                Halves halves{};
                columns == W ? std::memcpy(&halves, from, sizeof halves) : std::memcpy(&halves, from, columns * 2);
                word |= __builtin_convertvector(halves, Words) << 16 * half;
            }
        }
        square[i] = word;
    }
}

// Columns [begin, end) of the numbers [first, first + count) of a weight [k, n] as rows, `stride` bytes apart, which have
// room for whole vectors; words behind the numbers are 0.
template <class T>
void turn(const char* weight, int64_t n, int64_t begin, int64_t end, int64_t first, int64_t count, char* to,
          int64_t stride) {
    constexpr int64_t NUMBERS = W * 4 / T::size;
    const int64_t row = n * T::size;
    for (int64_t at = 0; at < count; at += NUMBERS) {
        const char* here = weight + (first + at) * row + begin * T::size;
        for (int64_t i = 0; i < NUMBERS; ++i)
            for (int64_t line = 0; line < (end - begin) * T::size; line += LINE)
                __builtin_prefetch(here + (ROWS_AHEAD + i) * row + line, 0, 2);
        for (int64_t column = begin; column < end; column += W, here += W * T::size) {
            Words square[W];
            const int64_t columns = std::min<int64_t>(W, end - column);
            load_square<T>(here, row, count - at, columns, square);
            transpose<W>(square);
            for (int64_t i = 0; i < columns; ++i)
                std::memcpy(to + (column - begin + i) * stride + at * T::size, &square[i], W * 4);
        }
    }
}

// The words along K of the W columns that begin at `at`, of which only `columns` are there without WHOLE; with `odd` half
// a word each.
template <class T, bool WHOLE>
inline Words words_of_columns(const char* at, int64_t row, int64_t columns, bool odd) {
    if constexpr (T::size == 4) return WHOLE ? load(at) : load_part(at, columns * 4);
    Halves low{}, high{};
    if constexpr (WHOLE) {
        std::memcpy(&low, at, sizeof low);
        if (!odd) std::memcpy(&high, at + row, sizeof high);
    } else {
        std::memcpy(&low, at, columns * 2);
        if (!odd) std::memcpy(&high, at + row, columns * 2);
    }
    return __builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 16;
}

// The same of 2 * W columns, all of which are there.
template <class T, int... I>
inline void words_of_twice(const char* at, int64_t row, Words (&words)[2], std::integer_sequence<int, I...>) {
    typedef uint16_t Numbers __attribute__((vector_size(W * 4)));
    constexpr int LANES = sizeof...(I);  // 2 * W
    Numbers low, high;
    std::memcpy(&low, at, sizeof low);
    std::memcpy(&high, at + row, sizeof high);
#if defined(__clang__)
    words[0] = (Words)__builtin_shufflevector(low, high, (I / 2 + I % 2 * LANES)...);
    words[1] = (Words)__builtin_shufflevector(low, high, (I / 2 + W + I % 2 * LANES)...);
#else
    words[0] = (Words)__builtin_shuffle(low, high, (Numbers){(I / 2 + I % 2 * LANES)...});
    words[1] = (Words)__builtin_shuffle(low, high, (Numbers){(I / 2 + W + I % 2 * LANES)...});
#endif
}

// Lines of rows of k to come, one row after another, as memory gives them fastest: a few in each step.
class ComingRows {
    const char* at;
    int64_t of_row, to_next_row, each, left, rows;

public:
    // `bytes` of each of `rows` rows, in so many steps.
    ComingRows(const char* at, int64_t row, int64_t bytes, int64_t rows, int64_t steps)
        : at(at), of_row((bytes + LINE - 1) / LINE), to_next_row(row - of_row * LINE),
          each((of_row * rows + steps - 1) / steps), left(of_row), rows(rows) {}

    void step() {
        if (rows <= 0) return;
        for (int64_t line = 0; line < each; ++line, at += LINE) {
            __builtin_prefetch(at, 0, 2);
            if (!--left) at += to_next_row, left = of_row, --rows;
        }
    }
};

// The columns [begin, end) against ROWS rows of x, over `count` numbers of K from `first`, added to sums [ROWS][stride].
template <class T, int ROWS, int VECTORS, bool WHOLE>
void add_columns(const Call& p, const Part& part, int64_t x_row, int64_t begin, int64_t end, int64_t first, int64_t count,
                 ComingRows& all_coming, float* sums, int64_t stride) {
    ComingRows coming = all_coming;  // in registers
    constexpr int EACH = 4 / T::size;
    const int64_t row = part.n * T::size, columns = std::min<int64_t>(W, end - begin);
    const char* weight = part.weight + first * row + begin * T::size;
    const char* x = p.x + (x_row * p.k + first) * T::size;
    Floats total[ROWS][VECTORS] = {};
    const auto step = [&](int64_t at, bool odd) __attribute__((always_inline)) {
        Words words[VECTORS];
        if (T::size == 2 && VECTORS % 2 == 0 && !odd) {
#pragma GCC unroll 4
            for (int v = 0; v + 1 < VECTORS; v += 2) {
                Words two[2];
                words_of_twice<T>(weight + v * W * T::size, row, two, std::make_integer_sequence<int, 2 * W>());
                words[v] = two[0], words[v + 1] = two[1];
            }
        } else {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
                words[v] = words_of_columns<T, WHOLE>(weight + v * W * T::size, row, columns, odd);
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const char* from = x + (r * p.k + at) * T::size;
            const Words word = odd ? load_part(from, T::size)[0] - Words{} : broadcast(from);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) total[r][v] = T::multiply_add(total[r][v], word, words[v]);
        }
        weight += EACH * row;
    };
    for (int64_t at = 0; at + EACH <= count; at += EACH) {
        coming.step();
        step(at, false);
    }
    all_coming = coming;
    if (count % EACH) step(count - 1, true);
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) {
            char* at = (char*)(sums + r * stride + v * W);
            total[r][v] += (Floats)load(at);
            std::memcpy(at, &total[r][v], sizeof(Floats));
        }
}

template <class T, int ROWS>
void add_column_range(const Call& p, const Part& part, int64_t x_row, int64_t begin, int64_t end, int64_t first,
                      int64_t count, ComingRows& coming, float* sums, int64_t stride) {
    for (int64_t column = begin; column < end; column += COLUMN_VECTORS * W, sums += COLUMN_VECTORS * W) {
        const bool whole = end - column >= COLUMN_VECTORS * W;
        if (whole) {
            add_columns<T, ROWS, COLUMN_VECTORS, true>(p, part, x_row, column, end, first, count, coming, sums, stride);
        } else {
            for (int64_t at = column; at < end; at += W)
                add_columns<T, ROWS, 1, false>(p, part, x_row, at, end, first, count, coming, sums + at - column, stride);
        }
    }
}

// A call of few rows against weights by columns, of which each thread of a team takes a part.
template <class T>
class FewByColumns {
    static constexpr int64_t COLUMNS = COLUMN_VECTORS * W;  // of a tile
    const Call* call;
    Tiles tiles;
    Split split;
    Shares shares;

    using Add = decltype(&add_column_range<T, 1>);
    static Add add_of(int64_t rows) {
        static constexpr Add all[] = {add_column_range<T, 1>, add_column_range<T, 2>, add_column_range<T, 3>,
                                      add_column_range<T, 4>};
        static_assert(MAX_COLUMN_ROWS == 4);
        return all[rows - 1];
    }

    void take(const Part& part, int64_t begin, int64_t end) const {
        const Call& p = *call;
        const int64_t stride = (end - begin + W - 1) / W * W;
        float* sums = reinterpret_cast<float*>(tile_scratch.at_least(p.m * stride * 4));
        std::memset(sums, 0, p.m * stride * 4);
        const int64_t row_bytes = part.n * T::size, chunks = (end - begin + COLUMNS - 1) / COLUMNS;
        for (int64_t first = 0; first < p.k; first += ROWS_AHEAD) {
            const int64_t count = std::min(ROWS_AHEAD, p.k - first), next = first + count;
            const char* there = part.weight + next * row_bytes + begin * T::size;
            const int64_t steps = std::max<int64_t>(1, chunks * count * T::size / 4);
            ComingRows coming(there, row_bytes, (end - begin) * T::size, std::min(ROWS_AHEAD, p.k - next), steps);
            for (int64_t row = 0; row < p.m; row += MAX_COLUMN_ROWS) {
                const int64_t rows = std::min<int64_t>(MAX_COLUMN_ROWS, p.m - row);
                add_of(rows)(p, part, row, begin, end, first, count, coming, sums + row * stride, stride);
            }
        }
        for (int64_t at = 0; at < end - begin; at += W) {
            const int64_t columns = std::min<int64_t>(W, end - begin - at);
            Floats bias{};
            for (int64_t i = 0; part.bias && i < columns; ++i) bias[i] = T::widen(part.bias + (begin + at + i) * T::size);
            for (int64_t row = 0; row < p.m; ++row) {
                char narrow[W * 4];
                T::store(narrow, (Floats)load((const char*)(sums + row * stride + at)) + bias);
                std::memcpy(part.y + (row * part.n + begin + at) * T::size, narrow, columns * T::size);
            }
        }
    }

public:
    static int64_t items(const Call& p) { return Split(p, Tiles(p, COLUMNS).count()).items; }

    FewByColumns(const Call& p, int64_t threads)
        : call(&p), tiles(p, COLUMNS), split(p, tiles.count()), shares(split.items, threads) {}

    void take(int64_t thread) {
        shares.take(thread, [&](int64_t item, int64_t) {
            const auto part_of = [&](const Part& part, int64_t begin, int64_t end, int64_t) {
                take(part, begin * COLUMNS, std::min(part.n, end * COLUMNS));
            };
            tiles.take(item * split.share, (item + 1) * split.share, 0, part_of);
        });
    }
};

}  // namespace
