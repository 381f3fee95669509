// y = x @ weight.T + bias on a CPU, with the weight read where it lies: [N, K] row-major, no packed copy kept.
//
// A "word" is the 32-bit unit of all the code below: one float32, or two bfloat16 that are neighbours along K. W words
// make a vector. Two kernels, both accumulating in float32:
//
//   dot        lanes run along K. A tile of weight rows is streamed once against up to eight rows of x; the W
//              accumulators of the tile are summed across their lanes together at the end.
//   broadcast  lanes run along the rows of x, which are first transposed into panels [K][W] (a cost of M * K, paid once
//              for all N). One word of the weight is broadcast at a time, straight from its row, so the weight needs
//              no packing and the accumulators no sum across lanes. Rows of the weight that would compete for one cache
//              set (strides near a multiple of 4096 bytes) go through a small padded buffer.
//
// Vectors are GCC vector extensions, so one source serves AVX-512, AVX2, NEON and plain C; bfloat16 products use the
// AVX-512 instruction where there is one, and shifts elsewhere.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
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
constexpr int MAX_DOT_ROWS = 8;
constexpr int64_t LINE = 64;
constexpr int64_t BLOCK_ROWS = 8 * TILE;           // weight rows whose float32 results are held before they are stored
constexpr int64_t MAX_X_ROWS = 512;                // rows of x packed at once
constexpr int64_t PACKED_BYTES = 384 * 1024;       // packed x that a core reuses from its own cache
constexpr int64_t PREFETCH_BYTES = 8 * 1024;

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

struct Problem {
    const char* x;       // [M, K]
    const char* weight;  // [N, K]
    const char* bias;    // [N] or null
    char* y;             // [M, N]
    int64_t m, n, k;
};

// ------------------------------------------------------------------------------------------------ few rows of x: dot

template <class T>
inline void store_one(const Problem& p, int64_t row, int64_t column, float value) {
    if (p.bias) value += T::widen(p.bias + column * T::size);
    Floats lanes = {value};
    char whole[W * 4];
    T::store(whole, lanes);
    std::memcpy(p.y + (row * p.n + column) * T::size, whole, T::size);
}

// Weight rows n .. n + W / ROWS (those from `end` on repeat the last one) against ROWS rows of x.
template <class T, int ROWS>
void dot_tile(const Problem& p, int64_t row, int64_t n, int64_t end) {
    constexpr int COLUMNS = W / ROWS;
    const int64_t bytes = p.k * T::size;
    const char* weight[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) weight[c] = p.weight + std::min(n + c, end - 1) * bytes;
    const char* x = p.x + row * bytes;
    const int64_t tile = COLUMNS * bytes;
    const int64_t ahead = (PREFETCH_BYTES + tile - 1) / tile * tile;
    Floats sums[W] = {};
    int64_t at = 0;
    for (; at + W * 4 <= bytes; at += W * 4) {
        Words vectors[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) vectors[r] = load(x + r * bytes + at);
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; ++c) {
            if (at % LINE == 0) __builtin_prefetch(weight[c] + at + ahead);
            const Words word = load(weight[c] + at);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r)
                sums[r * COLUMNS + c] = T::multiply_add(sums[r * COLUMNS + c], vectors[r], word);
        }
    }
    if (at < bytes) {
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r)
                sums[r * COLUMNS + c] = T::multiply_add(sums[r * COLUMNS + c], load_part(x + r * bytes + at, bytes - at),
                                                        load_part(weight[c] + at, bytes - at));
    }
    const Floats total = sum_lanes(sums);
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS && n + c < end; ++c) store_one<T>(p, row + r, n + c, total[r * COLUMNS + c]);
}

template <class T, int ROWS>
void dot_range(const Problem& p, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += W / ROWS) dot_tile<T, ROWS>(p, 0, n, end);
}

template <class T, int... R>
void dot(const Problem& p, int threads, std::integer_sequence<int, R...>) {
    using Range = void (*)(const Problem&, int64_t, int64_t);
    static constexpr Range ranges[] = {dot_range<T, R + 1>...};
    const int64_t units = (p.n + W - 1) / W;
#pragma omp parallel num_threads(threads)
    {
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        ranges[p.m - 1](p, units * part / parts * W, std::min(p.n, units * (part + 1) / parts * W));
    }
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
inline void pack_square(const Problem& p, int64_t row, int64_t rows, int64_t first, char* out) {
    const int64_t bytes = p.k * T::size, left = std::min<int64_t>(W * 4, bytes - first * 4);
    Words square[W];
    for (int i = 0; i < W; ++i) {
        const char* at = p.x + (row + i) * bytes + first * 4;
        square[i] = row + i >= rows ? Words{} : left == W * 4 ? load(at) : load_part(at, left);
    }
    transpose(square);
    for (int i = 0; i < W && i * 4 < left; ++i) std::memcpy(out + i * W * 4, &square[i], W * 4);
}

// TILE rows of the weight, `stride` bytes apart, against PANELS panels of x over `words` words; adds to (or sets)
// sums [TILE][panels * W]. `ahead`, if any, is where the next tile will be read.
template <class T, int PANELS>
void multiply_tile(const char* x, int64_t panel_bytes, const char* weight, int64_t stride, int64_t words, bool odd,
                   const char* ahead, int64_t ahead_stride, float* sums, int64_t sums_stride, bool add) {
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
    for (int64_t at = 0; at < words; at += 16) {
        if (ahead) {
#pragma GCC unroll 16
            for (int c = 0; c < TILE; ++c) __builtin_prefetch(ahead + c * ahead_stride + at * 4);
        }
        const int64_t now = std::min<int64_t>(16, words - at);
        for (int64_t i = 0; i < now; ++i) step(broadcast);
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
void store_block(const Problem& p, const float* sums, int64_t sums_stride, int64_t row, int64_t rows, int64_t column,
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

template <class T>
void broadcast_rows(const Problem& p, int threads, int64_t row, int64_t rows) {
    const int64_t bytes = p.k * T::size, words = (bytes + 3) / 4, panels = (rows + W - 1) / W;
    const int64_t fitting = PACKED_BYTES / (panels * W * 4) / 16 * 16;
    const int64_t depth = std::max<int64_t>(std::min(words, fitting), 128);  // words of K at a time
    char* packed = packed_scratch.at_least(panels * words * W * 4);
    const int64_t tiles = (p.n + TILE - 1) / TILE, sums_stride = panels * W;
    // Where a tile's rows start in few cache sets, a line of each would not stay in a 12-way cache until it is used up.
    const int64_t offset = bytes % 4096, distance = std::min(offset, 4096 - offset);
    const bool crowded = distance < 256 && bytes > LINE;
#pragma omp parallel num_threads(threads)
    {
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        const int64_t padded = depth * 4 + LINE;
        char* scratch = tile_scratch.at_least(BLOCK_ROWS * sums_stride * 4 + TILE * padded);
        float* sums = reinterpret_cast<float*>(scratch);
        char* copy = scratch + BLOCK_ROWS * sums_stride * 4;
        const int64_t squares = (words + W - 1) / W;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < panels * squares; ++i) {
            // Packed as [blocks of K][panel][word][W].
            const int64_t first = i % squares * W, panel = i / squares, block = first / depth * depth;
            const int64_t block_words = std::min(depth, words - block);
            pack_square<T>(p, row + panel * W, row + rows, first,
                           packed + (block * panels + panel * block_words + first - block) * W * 4);
        }
        const int64_t begin = tiles * part / parts, end = tiles * (part + 1) / parts;
        for (int64_t group = begin; group < end; group += BLOCK_ROWS / TILE) {
            const int64_t group_end = std::min(end, group + BLOCK_ROWS / TILE);
            for (int64_t block = 0; block < words; block += depth) {
                const int64_t now = std::min(depth, words - block);
                const int64_t now_bytes = std::min(now * 4, bytes - block * 4);
                for (int64_t tile = group; tile < group_end; ++tile) {
                    const int64_t here = std::min<int64_t>(TILE, p.n - tile * TILE);
                    const char* weight = p.weight + tile * TILE * bytes + block * 4;
                    const char* ahead = tile + 1 < end ? weight + TILE * bytes : nullptr;
                    int64_t stride = bytes;
                    if (crowded || here < TILE) {
                        for (int64_t c = 0; c < TILE; ++c)
                            std::memcpy(copy + c * padded, weight + std::min(c, here - 1) * bytes, now_bytes);
                        weight = copy, stride = padded;
                    }
                    float* out = sums + (tile - group) * TILE * sums_stride;
                    const char* x = packed + block * panels * W * 4;
                    for (int64_t panel = 0; panel < panels; panel += 2) {
                        const auto multiply = panel + 1 < panels ? multiply_tile<T, 2> : multiply_tile<T, 1>;
                        multiply(x + panel * now * W * 4, now * W * 4, weight, stride, now_bytes / 4,
                                 now_bytes % 4 != 0, ahead, bytes, out + panel * W, sums_stride, block > 0);
                        ahead = nullptr;
                    }
                }
            }
            store_block<T>(p, sums, sums_stride, row, rows, group * TILE,
                           std::min(p.n, group_end * TILE) - group * TILE);
        }
    }
}

template <class T>
void linear(const Problem& p, int threads) {
    if (p.m <= MAX_DOT_ROWS && p.m <= W) return dot<T>(p, threads, std::make_integer_sequence<int, std::min(W, MAX_DOT_ROWS)>());
    for (int64_t row = 0; row < p.m; row += MAX_X_ROWS)
        broadcast_rows<T>(p, threads, row, std::min(MAX_X_ROWS, p.m - row));
}

}  // namespace

// x [m, k], weight [n, k], bias [n] or null, y [m, n], all contiguous and of one dtype; m, n and k at least 1.
extern "C" void selective_linear(const void* x, const void* weight, const void* bias, void* y, int64_t m, int64_t n,
                                 int64_t k, int is_bfloat16, int threads) {
    const Problem p{static_cast<const char*>(x), static_cast<const char*>(weight), static_cast<const char*>(bias),
                    static_cast<char*>(y), m, n, k};
    is_bfloat16 ? linear<BFloat16>(p, threads) : linear<Float32>(p, threads);
}
