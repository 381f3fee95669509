// Matrix units for bfloat16 (Intel's AMX), where the compiler and the processor have them: MATRIX_UNIT.
//
// A product takes 16 rows of 16 words, two neighbours along K each, and 16 such words of K in 16 lanes. The sums, 16 rows
// of 16 lanes, are float32, and what is less than a normal number counts as 0, as with the AVX-512 instruction (Intel SDM,
// TDPBF16PS). The instructions do not say that they read memory: asm volatile("" ::: "memory") must be in front of them.

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

#else

inline bool has_matrix_unit() { return false; }
struct MatrixUnit {};

#endif

}  // namespace
