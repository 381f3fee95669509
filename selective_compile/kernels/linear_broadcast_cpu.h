// More rows of x against weights: lanes run along the rows of x, which are packed first.

#pragma once

#include <sched.h>

#include <cstdlib>

#include "linear_call.h"
#include "linear_words_cpu.h"

namespace {

// Rows of x multiplied at once, and how much of them (by cutting K) a core goes through for every tile: at 512 rows,
// with 1 MB of L2, 128 rows and 768 KB take 0.84-0.92 of the time of 512 rows and 384 KB, in both dtypes. Reading the
// weight four times is hidden behind the arithmetic of 128 rows.
constexpr int64_t MAX_X_ROWS = 128;
constexpr int64_t MAX_PASSES = 8;      // bounds the memory for packed x
constexpr int64_t PACKED_BYTES = 768 * 1024;
// Words of K that are summed one after another, from 0: over all of K = 14,336 in one go, sums of float32 were six times
// as far from the exact ones as those of MKL, and are as near with this.  Blocks of K are whole multiples, so that a row's
// sums do not depend on how many rows there are.
constexpr int64_t CHAIN = 256;
// Rows of a weight so many bytes apart, or a multiple, meet in one set of the L1 cache, 12 of them in as many ways: they
// are copied side by side before they are multiplied, which takes 0.71-0.87 of the time at K = 2048 in both dtypes.
// At half of it, where two sets are met, copying took 1.0-1.2 times as long.
constexpr int64_t SAME_SET_BYTES = 4096;
constexpr int64_t PACK_SQUARES = 8;     // squares of W x W words that a thread packs at a time

// Scratch of the calling thread, grown and kept until the thread ends.
struct Scratch {
    char* memory = nullptr;
    int64_t bytes = 0;
    ~Scratch() { std::free(memory); }
    char* at_least(int64_t wanted) {
        if (wanted > bytes) {
            std::free(memory);
            bytes = (wanted + 4095) / 4096 * 4096;
            memory = static_cast<char*>(std::aligned_alloc(4096, bytes));
            if (!memory) std::abort();
        }
        return memory;
    }
};
thread_local Scratch packed_scratch, tile_scratch;

// Words [first, first + W) of rows [row, row + W) of x as W vectors, vector i holding word i of every row. Rows from
// `rows` on, and words past the end of a row, are 0. With `twice`, the first half of the rows is also the second.
template <class T>
inline void pack_square(const Call& p, int64_t row, int64_t rows, int64_t first, bool twice, char* out) {
    const int64_t bytes = p.k * T::size, left = std::min<int64_t>(W * 4, bytes - first * 4);
    Words square[W];
    for (int i = 0; i < W; ++i) {
        const int64_t from = row + (twice ? i % (W / 2) : i);
        const char* at = p.x + from * bytes + first * 4;
        square[i] = from >= rows ? Words{} : left == W * 4 ? load(at) : load_part(at, left);
    }
    transpose(square);
    for (int i = 0; i < W && i * 4 < left; ++i) std::memcpy(out + i * W * 4, &square[i], W * 4);
}

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

// sums [columns rounded up to TILE][panels * W] to y[row ..][column ..], transposed, scaled, with the bias.
template <class T>
void store_block(const Part& p, const float* sums, int64_t sums_stride, int64_t row, int64_t rows, int64_t column,
                 int64_t columns) {
    for (int64_t c = 0; c < columns; c += W) {
        const int64_t now = std::min<int64_t>(W, columns - c);
        float bias[W] = {}, scales[W] = {};
        for (int64_t i = 0; p.bias && i < now; ++i) bias[i] = T::widen(p.bias + (column + c + i) * T::size);
        for (int64_t i = 0; i < now; ++i) scales[i] = p.scales ? p.scales[column + c + i] : 1.0f;
        const Floats added = (Floats)load((const char*)bias), scaled = (Floats)load((const char*)scales);
        for (int64_t r = 0; r < rows; r += W) {
            Words square[W];
            for (int i = 0; i < W; ++i)
                square[i] = i < now ? load((const char*)(sums + (c + i) * sums_stride + r)) : Words{};
            transpose(square);
            for (int i = 0; i < W && r + i < rows; ++i) {
                char* at = p.y + ((row + r + i) * p.n + column + c) * T::size;
                const Floats value = (Floats)square[i] * scaled + added;
                if (now == W) {
                    T::store(at, value);
                } else {
                    char whole[W * 4];
                    T::store(whole, value);
                    std::memcpy(at, whole, now * T::size);
                }
            }
        }
    }
}

// Up to MAX_X_ROWS rows of x, packed: [blocks of K][panel][word of the block][lane].
struct Packed {
    char* memory;
    int64_t row, rows;     // of x
    int64_t words, depth;  // of K, and of a block of it
    int64_t panels;

    // Whether it is the last panel, multiplied with the one before it, and has so few rows that it holds them twice.
    bool is_half(int64_t panel) const {
        return panel % 2 == 1 && panel == panels - 1 && rows - panel * W <= W / 2;
    }
    const char* block(int64_t first) const { return memory + first * panels * W * 4; }
    char* square(int64_t panel, int64_t first) const {
        const int64_t start = first / depth * depth, size = std::min(depth, words - start);
        return memory + (start * panels + panel * size + first - start) * W * 4;
    }
};

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

// Tiles [begin, end) of a weight against all of the packed rows; the thread goes on to read tiles up to `last`.
template <class T, class Weight>
void multiply_share(const Call& p, const Part& part, const Packed& x, int64_t begin, int64_t end, int64_t last) {
    constexpr int64_t AHEAD = TILE * 4 / T::size * Weight::size;
    const int64_t bytes = p.k * T::size, weight_bytes = p.k * Weight::size;
    const int64_t sums_stride = x.panels * W, padded = x.depth * 4 + LINE;
    char* scratch = tile_scratch.at_least((end - begin) * TILE * sums_stride * 4 + TILE * padded);
    float* sums = reinterpret_cast<float*>(scratch);
    char* copy = scratch + (end - begin) * TILE * sums_stride * 4;
    for (int64_t block = 0; block < x.words; block += x.depth) {
        const int64_t words = std::min(x.depth, x.words - block), block_bytes = std::min(words * 4, bytes - block * 4);
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t rows = std::min<int64_t>(TILE, part.n - tile * TILE);
            const char* weight = part.weight + tile * TILE * weight_bytes + block * 4 / T::size * Weight::size;
            const char* ahead = tile + 1 < last ? weight + TILE * weight_bytes : nullptr;
            int64_t stride = weight_bytes;
            if (rows < TILE || Weight::size != T::size || weight_bytes % SAME_SET_BYTES == 0) {
                for (int64_t c = 0; c < TILE; ++c)
                    copy_words<T, Weight>(weight + std::min(c, rows - 1) * weight_bytes, block_bytes / T::size,
                                          copy + c * padded);
                weight = copy, stride = padded;
            }
            float* out = sums + (tile - begin) * TILE * sums_stride;
            for (int64_t panel = 0; panel < x.panels; panel += 2) {
                const bool two = panel + 1 < x.panels, half = two && x.is_half(panel + 1);
                const auto multiply = half ? multiply_tile<T, 1, true>
                                      : two ? multiply_tile<T, 2, false>
                                            : multiply_tile<T, 1, false>;
                for (int64_t chain = 0; chain < words; chain += CHAIN) {
                    const int64_t chain_bytes = std::min(CHAIN * 4, block_bytes - chain * 4);
                    multiply(x.block(block) + (panel * words + chain) * W * 4, words * W * 4, weight + chain * 4, stride,
                             chain_bytes / 4, chain_bytes % 4 != 0, ahead ? ahead + chain * AHEAD : nullptr, AHEAD,
                             out + panel * W, sums_stride, block + chain > 0);
                }
                ahead = nullptr;
            }
        }
    }
    const int64_t column = begin * TILE;
    store_block<T>(part, sums, sums_stride, x.row, x.rows, column, std::min(part.n, end * TILE) - column);
}

struct Pass {
    Packed x;
    Shares packing, multiplying;
};

// One team for all passes: starting and ending one can cost milliseconds on a machine that has other work.
template <class T, class Weight>
void broadcast_rows(const Call& p, int64_t row, int64_t end, int64_t pass_rows) {
    const Tiles tiles(p, TILE);
    const int64_t words = (p.k * T::size + 3) / 4, units = tiles.count(), share = share_units(p, units);
    const int64_t runs = (words + W * PACK_SQUARES - 1) / (W * PACK_SQUARES), items = (units + share - 1) / share;
    const int64_t threads = team_size(p, items);
    char* memory = packed_scratch.at_least((end - row + W - 1) / W * words * W * 4);
    std::vector<Pass> passes;
    int64_t packings = 0;
    for (; row < end; row += pass_rows) {
        const int64_t rows = std::min(pass_rows, end - row), panels = (rows + W - 1) / W;
        const int64_t depth = std::min(words, std::max<int64_t>(1, PACKED_BYTES / (panels * W * 4) / CHAIN) * CHAIN);
        passes.push_back({{memory, row, rows, words, depth, panels}, {panels * runs, threads}, {items, threads}});
        memory += panels * words * W * 4;
        packings += panels * runs;
    }
    std::atomic<int64_t> packed{0};
    run_team(p, threads, [&](int64_t part) {
        for (Pass& pass : passes)
            pass.packing.take(part, [&](int64_t item, int64_t) {
                const Packed& x = pass.x;
                const int64_t panel = item / runs, first = item % runs * W * PACK_SQUARES;
                for (int64_t at = first; at < std::min(words, first + W * PACK_SQUARES); at += W)
                    pack_square<T>(p, x.row + panel * W, x.row + x.rows, at, x.is_half(panel), x.square(panel, at));
                packed.fetch_add(1, std::memory_order_release);
            });
        while (packed.load(std::memory_order_acquire) < packings) sched_yield();
        for (Pass& pass : passes)
            pass.multiplying.take(part, [&](int64_t item, int64_t last) {
                const auto multiply = [&](const Part& part, int64_t begin, int64_t end, int64_t last) {
                    multiply_share<T, Weight>(p, part, pass.x, begin, end, last);
                };
                tiles.take(item * share, (item + 1) * share, last * share, multiply);
            });
    });
}

}  // namespace
