// Matrix units for bfloat16 (Intel's AMX), where the compiler and the processor have them: MATRIX_UNIT.
//
// A product takes 16 rows of 16 words, two neighbours along K each, and 16 such words of K in 16 lanes. The sums, 16 rows
// of 16 lanes, are float32, and what is less than a normal number counts as 0, as with the AVX-512 instruction (Intel SDM,
// TDPBF16PS). Compilers are not told by these instructions that they read memory: hence asm volatile("" ::: "memory").

#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define MATRIX_UNIT 1
#else
#define MATRIX_UNIT 0
#endif

namespace {

#if MATRIX_UNIT

// Whether the system lets this process use them: it has to be asked, and the answer holds for all threads.
inline bool has_matrix_unit() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return allowed;
}

// All registers are 16 rows of 64 bytes while a thread has one; others may use them in another way behind it.
struct MatrixUnit {
    MatrixUnit() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }
    ~MatrixUnit() { _tile_release(); }
};

// 16 rows, and 16 more unless `lower` is null, each `stride` bytes behind the one before.
struct MatrixRows {
    const char *upper, *lower;
    int64_t stride;
};

// 16 lanes, and 16 more unless `right` is null; the next word of all lanes is `stride` bytes on.
struct MatrixLanes {
    const char *left, *right;
    int64_t stride;
};

// sums [16 or 32 rows][16 or 32 lanes], `stride` bytes from row to row, of `words` products of each row and lane, a multiple
// of 16; with `add`, they are added to what is there. before() comes in front of every 16.
template <class Before>
inline void multiply_rows(MatrixRows rows, MatrixLanes lanes, int64_t words, float* sums, int64_t stride, bool add,
                          Before&& before) {
    float *const right = sums + 16, *const lower = sums + 4 * stride, *const lower_right = lower + 16;
    const bool both = rows.lower && lanes.right;
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (add) {
        _tile_loadd(0, sums, stride);
        if (rows.lower) _tile_loadd(1, lower, stride);
        if (lanes.right) _tile_loadd(2, right, stride);
        if (both) _tile_loadd(3, lower_right, stride);
    }
    for (int64_t at = 0; at < words; at += 16) {
        before();
        const char *left_words = lanes.left + at * lanes.stride, *right_words = lanes.right ? lanes.right + at * lanes.stride : nullptr;
        _tile_loadd(6, left_words, lanes.stride);
        _tile_loadd(4, rows.upper + at * 4, rows.stride);
        _tile_dpbf16ps(0, 4, 6);
        if (rows.lower) {
            _tile_loadd(5, rows.lower + at * 4, rows.stride);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (lanes.right) {
            _tile_loadd(7, right_words, lanes.stride);
            _tile_dpbf16ps(2, 4, 7);
        }
        if (both) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, stride);
    if (rows.lower) _tile_stored(1, lower, stride);
    if (lanes.right) _tile_stored(2, right, stride);
    if (both) _tile_stored(3, lower_right, stride);
    asm volatile("" ::: "memory");
}

#else

inline bool has_matrix_unit() { return false; }
struct MatrixUnit {};

#endif

}  // namespace
