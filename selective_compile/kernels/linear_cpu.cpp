// y = x @ weight.T + bias on a CPU, with the weight read where it lies: [N, K] row-major, no packed copy kept.
//
// A "word" is the 32-bit unit of all the code below: one float32, or two bfloat16 that are neighbours along K. W words
// make a vector. Two kernels, both accumulating in float32:
//
//   dot        lanes run along K. A tile of weight rows is streamed once against up to eight rows of x; the tile's
//              accumulators are summed across their lanes together at the end.
//   broadcast  lanes run along the rows of x, which are first transposed into panels [K][W] (a cost of M * K, paid once
//              for all N). One word of the weight at a time is broadcast straight from its row, so the weight needs no
//              packing and the accumulators no sum across lanes.
//
// An output is summed in one order, whatever the other rows, columns and threads: a row's result changes with M only
// where M changes the kernel.
//
// Vectors are GCC vector extensions, so one source serves AVX-512, AVX2, NEON and plain C; bfloat16 products use the
// AVX-512 instruction where there is one, and shifts elsewhere. The team of threads is torch's own OpenMP runtime,
// called through the pointer that Python passes. Every thread has its own share of the weight's rows, which it reads
// front to back, and then helps with the others': a thread that the system takes off its core holds nobody up for long.

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, TILE = 12;  // 12 x 2 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int W = 8, TILE = 6;  // 6 x 2 of 16
#else
constexpr int W = 4, TILE = 6;
#endif
constexpr int64_t LINE = 64;
// dot against broadcast, 1 thread of a Zen 5 core (48 KB of L1), time in units of a plain read of the weight:
//   x of 12 KB and less   M = 3: 1.2 against 1.5-1.6   M = 5: 1.3 against 1.7   M = 8: 1.14 against 1.6 (bfloat16)
//   x of 20 KB and more   M = 4: 1.3 against 1.7       M = 5: 1.4 against 1.7   M = 8: 1.6-2.4 against 1.6-1.9
constexpr int MAX_DOT_ROWS = 8, SURE_DOT_ROWS = 5;
constexpr int64_t MAX_DOT_BYTES = 16 * 1024;
// How far ahead dot prefetches; 4, 16 and 32 KB were within 3 % of it. Without: 1.2 to 2 times slower from M = 4 on.
constexpr int64_t PREFETCH_BYTES = 8 * 1024;
constexpr int64_t MAX_SHARE_TILES = 8;  // of a thread's share at a time; also bounds the results held before a store
constexpr int64_t SHARES = 4;           // that many or more for each thread, where N allows
// Rows of x multiplied at once, and how much of them (by cutting K) a core goes through for every tile: at 512 rows,
// with 1 MB of L2, 128 rows and 768 KB take 0.84-0.92 of the time of 512 rows and 384 KB, in both dtypes. Reading the
// weight four times is hidden behind the arithmetic of 128 rows.
constexpr int64_t MAX_X_ROWS = 128;
constexpr int64_t MAX_PASSES = 8;      // bounds the memory for packed x
constexpr int64_t PACKED_BYTES = 768 * 1024;
constexpr int64_t MIN_DEPTH = 128;      // words of K at a time, at least
constexpr int64_t PACK_SQUARES = 8;     // squares of W x W words that a thread packs at a time

typedef float Floats __attribute__((vector_size(W * 4)));
typedef uint32_t Words __attribute__((vector_size(W * 4)));
typedef uint16_t Halves __attribute__((vector_size(W * 2)));

struct Float32 {
    static constexpr int64_t size = 4;
    static Floats multiply_add(Floats sum, Words a, Words b) { return sum + (Floats)a * (Floats)b; }
    static float widen(const char* at) {
        float value;
        std::memcpy(&value, at, 4);
        return value;
    }
    static void store(char* at, Floats value) { std::memcpy(at, &value, sizeof value); }
};

struct BFloat16 {
    static constexpr int64_t size = 2;
    static Floats multiply_add(Floats sum, Words a, Words b) {
#if defined(__AVX512BF16__)
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
        sum += (Floats)(a << 16) * (Floats)(b << 16);
        return sum + (Floats)(a & 0xffff0000u) * (Floats)(b & 0xffff0000u);
#endif
    }
    static float widen(const char* at) {
        uint16_t half;
        std::memcpy(&half, at, 2);
        uint32_t bits = uint32_t(half) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    static void store(char* at, Floats value) {
        // Round to nearest even; a NaN stays one.
        const Words bits = (Words)value;
        const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const Words is_nan = (Words)(value != value);
        const Halves halves = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0u), Halves);
        std::memcpy(at, &halves, sizeof halves);
    }
};

inline Words load(const char* at) {
    Words value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

inline Words load_part(const char* at, int64_t bytes) {
    Words value = {};
    std::memcpy(&value, at, bytes);
    return value;
}

inline Words broadcast(const char* at) {
    uint32_t word;
    std::memcpy(&word, at, 4);
    return word - (Words){};
}

// Lanes whose index has the bit D stay in `b`, the others in `a`; the rest of each moves by D into the other vector.
template <int D, class Vector, int... I>
inline void exchange(Vector& a, Vector& b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    const Vector low = __builtin_shufflevector(a, b, (I & D ? I - D + W : I)...);
    b = __builtin_shufflevector(a, b, (I & D ? I + W : I + D)...);
#else
    const Vector low = __builtin_shuffle(a, b, (Words){(I & D ? I - D + W : I)...});
    b = __builtin_shuffle(a, b, (Words){(I & D ? I + W : I + D)...});
#endif
    a = low;
}

template <int D = W / 2>
inline void transpose(Words (&rows)[W]) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
        if (!(i & D)) exchange<D>(rows[i], rows[i + D], std::make_integer_sequence<int, W>());
    if constexpr (D > 1) transpose<D / 2>(rows);
}

// Lane i of the result is the sum over the lanes of sums[i].
template <int D = W / 2>
inline Floats sum_lanes(Floats (&sums)[W]) {
#pragma GCC unroll 16
    for (int i = 0; i < D; ++i) {
        exchange<D>(sums[i], sums[i + D], std::make_integer_sequence<int, W>());
        sums[i] += sums[i + D];
    }
    if constexpr (D > 1) return sum_lanes<D / 2>(sums);
    return sums[0];
}

// What Python packs, 8 bytes a field.
struct Call {
    const char* x;       // [m, k]
    const char* weight;  // [n, k]
    const char* bias;    // [n] or null
    char* y;             // [m, n]
    int64_t m, n, k;     // at least 1
    int64_t is_bfloat16;
    int64_t threads;
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel, or null: one thread
};

// `items` of work, split evenly over `parts` threads; one that has finished its own part takes from the next one's.
class Shares {
    struct alignas(LINE) Counter { std::atomic<int64_t> taken{0}; };
    std::vector<Counter> counters;
    int64_t items;

public:
    Shares(int64_t items, int64_t parts) : counters(parts), items(items) {}

    // work(item, end), where `end` is the end of the part that the item belongs to.
    template <class Work>
    void take(int64_t part, Work&& work) {
        const int64_t parts = counters.size();
        for (int64_t i = 0; i < parts; ++i) {
            const int64_t from = (part + i) % parts, begin = items * from / parts, end = items * (from + 1) / parts;
            for (;;) {
                const int64_t item = begin + counters[from].taken.fetch_add(1, std::memory_order_relaxed);
                if (item >= end) break;
                work(item, end);
            }
        }
    }
};

template <class Body>
void run_team(const Call& p, int64_t threads, Body&& body) {
    if (threads == 1) return body(0);
    struct Job {
        Body& body;
        std::atomic<int64_t> started{0};
    } job{body};
    const auto enter = [](void* data) {
        Job& job = *static_cast<Job*>(data);
        job.body(job.started++);
    };
    p.parallel(enter, &job, unsigned(threads), 0);
}

inline int64_t team_size(const Call& p, int64_t items) { return p.parallel ? std::min(p.threads, items) : 1; }

// How many of `units` a thread takes at a time.
inline int64_t share_units(const Call& p, int64_t units) {
    return std::clamp<int64_t>(units / (p.threads * SHARES), 1, MAX_SHARE_TILES);
}

// ------------------------------------------------------------------------------------------------ few rows of x: dot

template <class T>
inline void store_one(const Call& p, int64_t row, int64_t column, float value) {
    if (p.bias) value += T::widen(p.bias + column * T::size);
    Floats lanes = {value};
    char whole[W * 4];
    T::store(whole, lanes);
    std::memcpy(p.y + (row * p.n + column) * T::size, whole, T::size);
}

// Weight rows n .. n + W / ROWS (those from `end` on repeat the last one) against ROWS rows of x.
template <class T, int ROWS>
void dot_tile(const Call& p, int64_t n, int64_t end) {
    constexpr int COLUMNS = W / ROWS;
    const int64_t bytes = p.k * T::size;
    const char* weight[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) weight[c] = p.weight + std::min(n + c, end - 1) * bytes;
    const char* x = p.x;
    // The rows of a tile are neighbours, so that tiles are read as one stream: prefetched so, it runs up to 1.3 times
    // faster than with each row prefetched for itself.
    const int64_t tile = COLUMNS * bytes;
    const char* ahead = p.weight + n * bytes + (PREFETCH_BYTES + tile - 1) / tile * tile;
    Floats sums[W] = {};
    int64_t at = 0;
    for (; at + W * 4 <= bytes; at += W * 4) {
        Words vectors[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) vectors[r] = load(x + r * bytes + at);
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; ++c) {
            if (at % LINE == 0) __builtin_prefetch(ahead + at * COLUMNS + c * LINE);
            const Words word = load(weight[c] + at);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r)
                sums[r * COLUMNS + c] = T::multiply_add(sums[r * COLUMNS + c], vectors[r], word);
        }
    }
    if (at < bytes) {
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; ++c) {
            const Words word = load_part(weight[c] + at, bytes - at);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                Floats& sum = sums[r * COLUMNS + c];
                sum = T::multiply_add(sum, load_part(x + r * bytes + at, bytes - at), word);
            }
        }
    }
    const Floats total = sum_lanes(sums);
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS && n + c < end; ++c) store_one<T>(p, r, n + c, total[r * COLUMNS + c]);
}

template <class T, int ROWS>
void dot_range(const Call& p, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += W / ROWS) dot_tile<T, ROWS>(p, n, end);
}

template <class T, int... R>
void dot(const Call& p, std::integer_sequence<int, R...>) {
    using Range = void (*)(const Call&, int64_t, int64_t);
    static constexpr Range ranges[] = {dot_range<T, R + 1>...};
    const Range range = ranges[p.m - 1];
    const int64_t units = (p.n + W - 1) / W, share = share_units(p, units), items = (units + share - 1) / share;
    const int64_t threads = team_size(p, items);
    Shares shares(items, threads);
    run_team(p, threads, [&](int64_t part) {
        shares.take(part, [&](int64_t item, int64_t) {
            range(p, item * share * W, std::min(p.n, (item + 1) * share * W));
        });
    });
}

// ------------------------------------------------------------------------------------- more rows of x: broadcast

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
// `rows` on, and words past the end of a row, are 0.
template <class T>
inline void pack_square(const Call& p, int64_t row, int64_t rows, int64_t first, char* out) {
    const int64_t bytes = p.k * T::size, left = std::min<int64_t>(W * 4, bytes - first * 4);
    Words square[W];
    for (int i = 0; i < W; ++i) {
        const char* at = p.x + (row + i) * bytes + first * 4;
        square[i] = row + i >= rows ? Words{} : left == W * 4 ? load(at) : load_part(at, left);
    }
    transpose(square);
    for (int i = 0; i < W && i * 4 < left; ++i) std::memcpy(out + i * W * 4, &square[i], W * 4);
}

// TILE rows of the weight, `stride` bytes apart, against PANELS panels of x over `words` words, and half a word more if
// `odd`; adds to (or sets) sums [TILE][panels * W]. `ahead`, if any, is where as many bytes will be read next.
template <class T, int PANELS>
void multiply_tile(const char* x, int64_t panel_bytes, const char* weight, int64_t stride, int64_t words, bool odd,
                   const char* ahead, float* sums, int64_t sums_stride, bool add) {
    Floats total[TILE][PANELS];
#pragma GCC unroll 16
    for (int c = 0; c < TILE; ++c)
#pragma GCC unroll 2
        for (int j = 0; j < PANELS; ++j) {
            total[c][j] = Floats{};
            if (add) total[c][j] = (Floats)load((const char*)(sums + c * sums_stride + j * W));
        }
    const auto step = [&](auto word_at) __attribute__((always_inline)) {
        Words vectors[PANELS];
#pragma GCC unroll 2
        for (int j = 0; j < PANELS; ++j) vectors[j] = load(x + j * panel_bytes);
        const char* base = weight;
#pragma GCC unroll 16
        for (int c = 0; c < TILE; ++c) {
            const Words word = word_at(base + (c % 3) * stride);
            if (c % 3 == 2) base += 3 * stride;
#pragma GCC unroll 2
            for (int j = 0; j < PANELS; ++j) total[c][j] = T::multiply_add(total[c][j], vectors[j], word);
        }
        x += W * 4;
        weight += 4;
    };
    for (int64_t at = 0; at < words; ++at) {
        // A step reads TILE words, so this walks once through the next tile, as one stream. A prefetch row by row would
        // fill few cache sets where a row is a multiple of 4096 bytes: 1.25 times slower there at M = 16.
        if (ahead) __builtin_prefetch(ahead + at * TILE * 4);
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
        for (int j = 0; j < PANELS; ++j)
            std::memcpy(sums + c * sums_stride + j * W, &total[c][j], sizeof(Floats));
}

// sums [columns rounded up to TILE][panels * W] to y[row ..][column ..], transposed, with the bias.
template <class T>
void store_block(const Call& p, const float* sums, int64_t sums_stride, int64_t row, int64_t rows, int64_t column,
                 int64_t columns) {
    for (int64_t c = 0; c < columns; c += W) {
        const int64_t now = std::min<int64_t>(W, columns - c);
        float bias[W] = {};
        for (int64_t i = 0; p.bias && i < now; ++i) bias[i] = T::widen(p.bias + (column + c + i) * T::size);
        const Floats added = (Floats)load((const char*)bias);
        for (int64_t r = 0; r < rows; r += W) {
            Words square[W];
            for (int i = 0; i < W; ++i)
                square[i] = i < now ? load((const char*)(sums + (c + i) * sums_stride + r)) : Words{};
            transpose(square);
            for (int i = 0; i < W && r + i < rows; ++i) {
                char* at = p.y + ((row + r + i) * p.n + column + c) * T::size;
                if (now == W) {
                    T::store(at, (Floats)square[i] + added);
                } else {
                    char whole[W * 4];
                    T::store(whole, (Floats)square[i] + added);
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

    const char* block(int64_t first) const { return memory + first * panels * W * 4; }
    char* square(int64_t panel, int64_t first) const {
        const int64_t start = first / depth * depth, size = std::min(depth, words - start);
        return memory + (start * panels + panel * size + first - start) * W * 4;
    }
};

// Tiles [begin, end) of the weight against all of the packed rows; the thread goes on to read tiles up to `last`.
template <class T>
void multiply_share(const Call& p, const Packed& x, int64_t begin, int64_t end, int64_t last) {
    const int64_t bytes = p.k * T::size, sums_stride = x.panels * W, padded = x.depth * 4 + LINE;
    char* scratch = tile_scratch.at_least((end - begin) * TILE * sums_stride * 4 + TILE * padded);
    float* sums = reinterpret_cast<float*>(scratch);
    char* copy = scratch + (end - begin) * TILE * sums_stride * 4;
    for (int64_t block = 0; block < x.words; block += x.depth) {
        const int64_t words = std::min(x.depth, x.words - block), block_bytes = std::min(words * 4, bytes - block * 4);
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t rows = std::min<int64_t>(TILE, p.n - tile * TILE);
            const char* weight = p.weight + tile * TILE * bytes + block * 4;
            const char* ahead = tile + 1 < last ? weight + TILE * bytes : nullptr;
            int64_t stride = bytes;
            if (rows < TILE) {
                for (int64_t c = 0; c < TILE; ++c)
                    std::memcpy(copy + c * padded, weight + std::min(c, rows - 1) * bytes, block_bytes);
                weight = copy, stride = padded;
            }
            float* out = sums + (tile - begin) * TILE * sums_stride;
            for (int64_t panel = 0; panel < x.panels; panel += 2) {
                const auto multiply = panel + 1 < x.panels ? multiply_tile<T, 2> : multiply_tile<T, 1>;
                multiply(x.block(block) + panel * words * W * 4, words * W * 4, weight, stride, block_bytes / 4,
                         block_bytes % 4 != 0, ahead, out + panel * W, sums_stride, block > 0);
                ahead = nullptr;
            }
        }
    }
    store_block<T>(p, sums, sums_stride, x.row, x.rows, begin * TILE, std::min(p.n, end * TILE) - begin * TILE);
}

struct Pass {
    Packed x;
    Shares packing, multiplying;
};

// One team for all passes: starting and ending one can cost milliseconds on a machine that has other work.
template <class T>
void broadcast_rows(const Call& p, int64_t row, int64_t end, int64_t pass_rows) {
    const int64_t words = (p.k * T::size + 3) / 4, tiles = (p.n + TILE - 1) / TILE, share = share_units(p, tiles);
    const int64_t runs = (words + W * PACK_SQUARES - 1) / (W * PACK_SQUARES), items = (tiles + share - 1) / share;
    const int64_t threads = team_size(p, items);
    char* memory = packed_scratch.at_least((end - row + W - 1) / W * words * W * 4);
    std::vector<Pass> passes;
    int64_t packings = 0;
    for (; row < end; row += pass_rows) {
        const int64_t rows = std::min(pass_rows, end - row), panels = (rows + W - 1) / W;
        const int64_t depth = std::max(MIN_DEPTH, std::min(words, PACKED_BYTES / (panels * W * 4) / W * W));
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
                    pack_square<T>(p, x.row + panel * W, x.row + x.rows, at, x.square(panel, at));
                packed.fetch_add(1, std::memory_order_release);
            });
        while (packed.load(std::memory_order_acquire) < packings) sched_yield();
        for (Pass& pass : passes)
            pass.multiplying.take(part, [&](int64_t item, int64_t last) {
                const int64_t begin = item * share;
                multiply_share<T>(p, pass.x, begin, std::min(tiles, begin + share), std::min(tiles, last * share));
            });
    });
}

template <class T>
void linear(const Call& p) {
    constexpr int MOST = std::min(W, MAX_DOT_ROWS);
    if (p.m <= std::min(W, SURE_DOT_ROWS) || (p.m <= MOST && p.m * p.k * T::size <= MAX_DOT_BYTES))
        return dot<T>(p, std::make_integer_sequence<int, MOST>());
    const int64_t passes = (p.m + MAX_X_ROWS - 1) / MAX_X_ROWS, rows = ((p.m + passes - 1) / passes + W - 1) / W * W;
    for (int64_t row = 0; row < p.m; row += MAX_PASSES * rows)
        broadcast_rows<T>(p, row, std::min(p.m, row + MAX_PASSES * rows), rows);
}

}  // namespace

// x, weight, bias and y are contiguous and of one dtype.
extern "C" void selective_linear(const Call* call) {
    call->is_bfloat16 ? linear<BFloat16>(*call) : linear<Float32>(*call);
}
