// Weights that lie by columns, [k, n] row-major, multiplied by rows of x as both lie, lanes running along n.
//
// A row of k numbers is a page of its own, or several: what is read of it at once is as wide as an item of work, so that
// addresses are translated once for many lines, and the rows to come are fetched, which the processor does not by itself.
// A block of K, as wide as an item, stays in the second level of the cache while all rows of x are multiplied by it.

#pragma once

#include <algorithm>

#include "linear_call.h"
#include "linear_words_cpu.h"
#include "thread_scratch_cpu.h"

namespace {

// Numbers of K that are summed from 0, before the sums are added to those so far, and how far ahead lines are fetched.
constexpr int64_t ROWS_AHEAD = 64;
// Of x multiplied at once, and of columns: as registers allow. And rows of x for which one item has its sums.
constexpr int MAX_COLUMN_ROWS = 6, COLUMN_VECTORS = W == 16 ? 4 : 2;
constexpr int64_t PASS_ROWS = 256;

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

// `count` rows of k of some columns, `row` bytes apart.
struct ColumnBlock {
    const char* at;
    int64_t row, count, columns;

    template <class T>
    ColumnBlock from(int64_t column) const { return {at + column * T::size, row, count, columns - column}; }
};

// Columns against ROWS rows of x, [ROWS][x_row numbers], added to sums [ROWS][stride]; without WHOLE the first W of them, or
// fewer.
template <class T, int ROWS, int VECTORS, bool WHOLE>
void add_columns(ColumnBlock block, const char* x, int64_t x_row, ComingRows& all_coming, float* sums, int64_t stride) {
    ComingRows coming = all_coming;  // in registers
    constexpr int EACH = 4 / T::size;
    const int64_t row = block.row, count = block.count, columns = std::min<int64_t>(W, block.columns);
    const char* weight = block.at;
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
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const char* from = x + (r * x_row + at) * T::size;
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
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            char* at = (char*)(sums + r * stride + v * W);
            total[r][v] += (Floats)load(at);
            std::memcpy(at, &total[r][v], sizeof(Floats));
        }
}

template <class T, int ROWS>
void add_block(ColumnBlock block, const char* x, int64_t x_row, ComingRows& coming, float* sums, int64_t stride) {
    if (block.columns == COLUMN_VECTORS * W)
        return add_columns<T, ROWS, COLUMN_VECTORS, true>(block, x, x_row, coming, sums, stride);
    for (int64_t column = 0; column < block.columns; column += W)
        add_columns<T, ROWS, 1, false>(block.template from<T>(column), x, x_row, coming, sums + column, stride);
}

// The sums of `rows` rows of x from `x_row` on, [rows][stride], to the columns [begin, end) of y, with the bias.
template <class T>
void store_columns(const Call& p, const Part& part, int64_t x_row, int64_t rows, int64_t begin, int64_t end,
                   const float* sums, int64_t stride) {
    for (int64_t at = 0; at < end - begin; at += W) {
        const int64_t columns = std::min<int64_t>(W, end - begin - at);
        Floats bias{};
        for (int64_t i = 0; part.bias && i < columns; ++i) bias[i] = T::widen(part.bias + (begin + at + i) * T::size);
        for (int64_t row = 0; row < rows; ++row) {
            char narrow[W * 4];
            T::store(narrow, (Floats)load((const char*)(sums + row * stride + at)) + bias);
            char* to = part.y + ((x_row + row) * part.n + begin + at) * T::size;
            columns == W ? std::memcpy(to, narrow, W * T::size) : std::memcpy(to, narrow, columns * T::size);
        }
    }
}

// Columns of a weight as they lie, word by word along K.
template <class T_>
struct Direct {
    using T = T_;
    static constexpr int64_t COLUMNS = COLUMN_VECTORS * W;  // of a tile
    struct Unit {};

    using Add = decltype(&add_block<T, 1>);
    static Add add_of(int64_t rows) {
        static constexpr Add all[] = {add_block<T, 1>, add_block<T, 2>, add_block<T, 3>,
                                      add_block<T, 4>, add_block<T, 5>, add_block<T, 6>};
        static_assert(MAX_COLUMN_ROWS == 6);
        return all[rows - 1];
    }

    static void multiply(const Call& p, const Part& part, int64_t x_row, int64_t rows, int64_t begin, int64_t end) {
        const int64_t stride = (end - begin + W - 1) / W * W, sums_bytes = rows * stride * 4;
        float* sums = reinterpret_cast<float*>(tile_scratch.at_least(sums_bytes));
        std::memset(sums, 0, sums_bytes);
        const int64_t blocks = (end - begin + COLUMNS - 1) / COLUMNS * ((rows + MAX_COLUMN_ROWS - 1) / MAX_COLUMN_ROWS);
        for (int64_t first = 0; first < p.k; first += ROWS_AHEAD) {
            const int64_t count = std::min(ROWS_AHEAD, p.k - first), next = first + count, row_bytes = part.n * T::size;
            const char* there = part.weight + next * row_bytes + begin * T::size;
            const int64_t steps = std::max<int64_t>(1, blocks * count * T::size / 4);
            ComingRows coming(there, row_bytes, (end - begin) * T::size, std::min(ROWS_AHEAD, p.k - next), steps);
            for (int64_t column = begin; column < end; column += COLUMNS) {
                const char* here = part.weight + first * row_bytes + column * T::size;
                const ColumnBlock block{here, row_bytes, count, std::min(COLUMNS, end - column)};
                for (int64_t row = 0; row < rows; row += MAX_COLUMN_ROWS)
                    add_of(std::min<int64_t>(MAX_COLUMN_ROWS, rows - row))(
                        block, p.x + ((x_row + row) * p.k + first) * T::size, p.k, coming,
                        sums + row * stride + column - begin, stride);
            }
        }
        store_columns<T>(p, part, x_row, rows, begin, end, sums, stride);
    }
};

// A call against weights by columns, of which each thread of a team takes a part; `Way` multiplies some rows of x by some
// columns.
template <class Way>
class ColumnsCall {
    const Call* call;
    Tiles tiles;
    Split split;
    Shares shares;

    static void multiply(const Call& p, const Part& part, int64_t begin, int64_t end) {
        for (int64_t row = 0; row < p.m; row += PASS_ROWS)
            Way::multiply(p, part, row, std::min(PASS_ROWS, p.m - row), begin, end);
    }

public:
    static int64_t items(const Call& p) { return Split(p, Tiles(p, Way::COLUMNS).count()).items; }

    ColumnsCall(const Call& p, int64_t threads)
        : call(&p), tiles(p, Way::COLUMNS), split(p, tiles.count()), shares(split.items, threads) {}

    void take(int64_t thread) {
        const typename Way::Unit unit;
        shares.take(thread, [&](int64_t item, int64_t) {
            const auto part_of = [&](const Part& part, int64_t begin, int64_t end, int64_t) {
                multiply(*call, part, begin * Way::COLUMNS, std::min(part.n, end * Way::COLUMNS));
            };
            tiles.take(item * split.share, (item + 1) * split.share, 0, part_of);
        });
    }
};

}  // namespace
