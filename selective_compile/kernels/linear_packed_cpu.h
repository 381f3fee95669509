// More rows of x against weights, a tile of a weight's rows at a time: x is packed first, and what is done with a tile is
// the `Way`, of which there are two, `Broadcast` and `Matrix`:
//
//   T, Weight        the words of x, and how those of the weight are had
//   ROWS             of a weight, in a tile
//   WORDS            packed x and copied weights are 0 up to a multiple of so many words of K
//   X_ROWS, PASSES   rows of x that a pass over the weights multiplies, at most, and passes that are packed at once
//   HALVES           whether a last panel of few rows may hold them twice
//   Unit             what a thread has while it multiplies
//   depth(words, panels)  words of K in a block, all of them or a multiple of CHAIN
//   copied(bytes)    whether rows of a weight so many bytes apart are copied side by side first
//   multiply(...)    a tile against a block of all panels

#pragma once

#include <sched.h>

#include "linear_call.h"
#include "linear_words_cpu.h"
#include "thread_scratch_cpu.h"

namespace {

// Words of K that are summed one after another, from 0: over all of K = 14,336 in one go, sums of float32 were six times
// as far from the exact ones as those of MKL, and are as near with this.  Blocks of K are whole multiples, so that a row's
// sums do not depend on how many rows there are.
constexpr int64_t CHAIN = 256;
constexpr int64_t PACK_SQUARES = 8;     // squares of W x W words that a thread packs at a time

// Up to X_ROWS rows of x, packed: [blocks of K][panel][word of the block][lane].
struct Packed {
    char* memory;
    int64_t row, rows;     // of x
    int64_t words, depth;  // of K, and of a block of it
    int64_t panels;
    bool halves;

    // Whether it is the last panel, multiplied with the one before it, and has so few rows that it holds them twice.
    bool is_half(int64_t panel) const {
        return halves && panel % 2 == 1 && panel == panels - 1 && rows - panel * W <= W / 2;
    }
    const char* block(int64_t first) const { return memory + first * panels * W * 4; }
    char* square(int64_t panel, int64_t first) const {
        const int64_t start = first / depth * depth, size = std::min(depth, words - start);
        return memory + (start * panels + panel * size + first - start) * W * 4;
    }
};

// Words [first, first + W) of rows [row, row + W) of x as W vectors, vector i holding word i of every row. Rows from
// `rows` on, and words past the end of a row, are 0; there are `words`. With `twice`, the first half of the rows is also
// the second.
template <class T>
inline void pack_square(const Call& p, int64_t row, int64_t rows, int64_t first, int64_t words, bool twice, char* out) {
    const int64_t bytes = p.k * T::size, left = std::clamp<int64_t>(bytes - first * 4, 0, W * 4);
    Words square[W];
    for (int i = 0; i < W; ++i) {
        const int64_t from = row + (twice ? i % (W / 2) : i);
        const char* at = p.x + from * bytes + first * 4;
        square[i] = from >= rows ? Words{} : left == W * 4 ? load(at) : load_part(at, left);
    }
    transpose<W>(square);
    for (int i = 0; i < W && first + i < words; ++i) std::memcpy(out + i * W * 4, &square[i], W * 4);
}

// `numbers` of a weight, as words; those past the last word's are 0.
template <class T, class Weight>
void copy_words(const char* from, int64_t numbers, char* to) {
    constexpr int64_t NUMBERS = W * 4 / T::size;
    for (int64_t at = 0; at < numbers; at += NUMBERS) {
        const int64_t left = numbers - at;
        const char* here = from + at * Weight::size;
        const Words words = left < NUMBERS ? Weight::words(here, left) : Weight::words(here);
        std::memcpy(to + at * T::size, &words, W * 4);
    }
}

// One block of K: where it begins, its words, and the bytes of them that x has.
struct Block {
    int64_t first, words, bytes;
};

// ROWS rows of a weight, `stride` bytes apart; `ahead`, if any, is the tile that will be read next, where it lies.
struct WeightTile {
    const char* at;
    int64_t stride;
    const char* ahead;
    int64_t ahead_stride;
};

// sums [columns rounded up to W words of y][panels * W] to y[row ..][column ..], transposed, scaled, with the bias.
template <class T>
void store_block(const Part& p, const float* sums, int64_t sums_stride, int64_t row, int64_t rows, int64_t column,
                 int64_t columns) {
    constexpr int64_t NUMBERS = W * 4 / T::size;
    for (int64_t c = 0; c < columns; c += NUMBERS) {
        const int64_t now = std::min(NUMBERS, columns - c);
        float bias[NUMBERS] = {}, scales[NUMBERS] = {};
        for (int64_t i = 0; p.bias && i < now; ++i) bias[i] = T::widen(p.bias + (column + c + i) * T::size);
        for (int64_t i = 0; i < now; ++i) scales[i] = p.scales ? p.scales[column + c + i] : 1.0f;
        for (int64_t r = 0; r < rows; r += W) {
            const auto number = [&](int64_t i) __attribute__((always_inline)) {
                const Floats sum = i < now ? (Floats)load((const char*)(sums + (c + i) * sums_stride + r)) : Floats{};
                return sum * scales[i] + bias[i];
            };
            Words square[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i)
                if constexpr (T::size == 4) square[i] = (Words)number(i);
                else square[i] = T::narrow(number(2 * i)) | T::narrow(number(2 * i + 1)) << 16;
            transpose<W>(square);
            for (int i = 0; i < W && r + i < rows; ++i) {
                char* at = p.y + ((row + r + i) * p.n + column + c) * T::size;
                now == NUMBERS ? std::memcpy(at, &square[i], W * 4) : std::memcpy(at, &square[i], now * T::size);
            }
        }
    }
}

// A tile of a weight for a block of K: where it lies, or copied to `copy` [ROWS][padded].
template <class Way>
WeightTile weight_tile(const Call& p, const Part& part, Block block, int64_t tile, int64_t last, char* copy, int64_t padded) {
    using T = typename Way::T;
    using Weight = typename Way::Weight;
    constexpr int64_t ROWS = Way::ROWS;
    const int64_t rows = std::min(ROWS, part.n - tile * ROWS), weight_bytes = p.k * Weight::size;
    const char* weight = part.weight + tile * ROWS * weight_bytes + block.first * 4 / T::size * Weight::size;
    const char* ahead = tile + 1 < last ? weight + ROWS * weight_bytes : nullptr;
    if (rows == ROWS && Weight::size == T::size && !Way::copied(weight_bytes))
        return {weight, weight_bytes, ahead, weight_bytes};
    for (int64_t c = 0; c < ROWS; ++c) {
        const char* row = weight + std::min(c, rows - 1) * weight_bytes;
        copy_words<T, Weight>(row, block.bytes / T::size, copy + c * padded);
    }
    return {copy, padded, ahead, weight_bytes};
}

// Tiles [begin, end) of a weight against all of the packed rows; the thread goes on to read tiles up to `last`.
template <class Way>
void multiply_share(const Call& p, const Part& part, const Packed& x, int64_t begin, int64_t end, int64_t last) {
    using T = typename Way::T;
    constexpr int64_t ROWS = Way::ROWS;
    const int64_t bytes = p.k * T::size;
    const int64_t sums_stride = x.panels * W, padded = x.depth * 4 + LINE;
    char* scratch = tile_scratch.at_least((end - begin) * ROWS * sums_stride * 4 + ROWS * padded);
    float* sums = reinterpret_cast<float*>(scratch);
    char* copy = scratch + (end - begin) * ROWS * sums_stride * 4;
    for (int64_t first = 0; first < x.words; first += x.depth) {
        const int64_t words = std::min(x.depth, x.words - first);
        const Block block{first, words, std::min(words * 4, bytes - first * 4)};
        for (int64_t tile = begin; tile < end; ++tile) {
            float* const tile_sums = sums + (tile - begin) * ROWS * sums_stride;
            Way::multiply(x, block, weight_tile<Way>(p, part, block, tile, last, copy, padded), tile_sums);
        }
    }
    const int64_t column = begin * ROWS;
    store_block<T>(part, sums, sums_stride, x.row, x.rows, column, std::min(part.n, end * ROWS) - column);
}

// Rows [row, row + rows) of a call's x: what a pass over its weights multiplies.
struct PassRows {
    const Call* call;
    int64_t row, rows;
};

// All rows of x, in passes as equal as panels allow.
template <class Way>
void add_passes(const Call& p, std::vector<PassRows>& passes) {
    const int64_t count = (p.m + Way::X_ROWS - 1) / Way::X_ROWS, rows = ((p.m + count - 1) / count + W - 1) / W * W;
    for (int64_t row = 0; row < p.m; row += rows) passes.push_back({&p, row, std::min(rows, p.m - row)});
}

// Passes that one team makes, of one call or several: the rows of all are packed first.
template <class Way>
class Passes {
    using T = typename Way::T;
    struct Pass {
        const Call* call;
        Packed x;
        Tiles tiles;
        Split split;  // of the tiles
        Shares packing, multiplying;
    };
    std::vector<Pass> passes;
    int64_t packings = 0;
    std::atomic<int64_t> packed{0};

    static int64_t words_of(const Call& p) { return (p.k * T::size + 4 * Way::WORDS - 1) / (4 * Way::WORDS) * Way::WORDS; }
    static int64_t panels_of(const PassRows& rows) { return (rows.rows + W - 1) / W; }
    static int64_t runs_of(const Call& p) { return (words_of(p) + W * PACK_SQUARES - 1) / (W * PACK_SQUARES); }

    void pack_item(const Pass& pass, int64_t item) {
        const Packed& x = pass.x;
        const int64_t runs = runs_of(*pass.call), panel = item / runs, first = item % runs * W * PACK_SQUARES;
        for (int64_t at = first; at < std::min(x.words, first + W * PACK_SQUARES); at += W)
            pack_square<T>(*pass.call, x.row + panel * W, x.row + x.rows, at, x.words, x.is_half(panel), x.square(panel, at));
        packed.fetch_add(1, std::memory_order_release);
    }

public:
    static int64_t packed_rows(const PassRows& rows) { return panels_of(rows) * W; }
    static int64_t items(const PassRows& rows) { return Split(*rows.call, Tiles(*rows.call, Way::ROWS).count()).items; }

    Passes(const PassRows* begin, const PassRows* end, int64_t threads) {
        int64_t bytes = 0;
        for (const PassRows* at = begin; at < end; ++at) bytes += panels_of(*at) * words_of(*at->call) * W * 4;
        char* memory = packed_scratch.at_least(bytes);
        for (const PassRows* at = begin; at < end; ++at) {
            const Call& p = *at->call;
            const int64_t words = words_of(p), panels = panels_of(*at);
            const Packed x{memory, at->row, at->rows, words, Way::depth(words, panels), panels, Way::HALVES};
            const Tiles tiles(p, Way::ROWS);
            const Split split(p, tiles.count());
            passes.push_back({&p, x, tiles, split, {panels * runs_of(p), threads}, {split.items, threads}});
            memory += panels * words * W * 4;
            packings += panels * runs_of(p);
        }
    }

    void pack(int64_t thread) {
        for (Pass& pass : passes) pass.packing.take(thread, [&](int64_t item, int64_t) { pack_item(pass, item); });
    }

    // Behind what every thread has packed.
    void multiply(int64_t thread) {
        if (passes.empty()) return;
        while (packed.load(std::memory_order_acquire) < packings) sched_yield();
        const typename Way::Unit unit;
        for (Pass& pass : passes)
            pass.multiplying.take(thread, [&](int64_t item, int64_t last) {
                const auto multiply = [&](const Part& part, int64_t begin, int64_t end, int64_t last) {
                    multiply_share<Way>(*pass.call, part, pass.x, begin, end, last);
                };
                const int64_t share = pass.split.share;
                pass.tiles.take(item * share, (item + 1) * share, last * share, multiply);
            });
    }
};

}  // namespace
