// The words that linear layers are computed in: vectors of them, products of two, sums across lanes.
//
// A "word" is 32 bits: one float32, or two bfloat16 that are neighbours along K. W words make a vector. Vectors are GCC
// vector extensions, so one source serves AVX-512, AVX2, NEON and plain C; bfloat16 products use the AVX-512
// instruction where there is one, and shifts elsewhere.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "transpose_cpu.h"
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
    // Rounded to nearest, ties to even, in the low half of each word; a NaN stays one.
    static Words narrow(Floats value) {
        const Words bits = (Words)value;
        const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const Words is_nan = (Words)(value != value);
        return (rounded & ~is_nan) | (is_nan & 0x7fc0u);
    }
    static void store(char* at, Floats value) {
        const Halves halves = __builtin_convertvector(narrow(value), Halves);
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

// How the words of a weight are had: of one that has x's dtype, and of one of int8, whose numbers bfloat16 holds exactly.
template <class T>
struct Same {
    static constexpr int64_t size = T::size;
    static Words words(const char* at) { return load(at); }
    static Words words(const char* at, int64_t count) { return load_part(at, count * size); }
};

template <class T>
struct Int8 {
    static constexpr int64_t size = 1;
    static Words words(const char* at) {
        typedef int32_t Ints __attribute__((vector_size(W * 4)));
        if constexpr (T::size == 4) {
#if defined(__AVX512F__)
            return (Words)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
#else
            typedef int8_t Bytes __attribute__((vector_size(W)));
            Bytes bytes;
            std::memcpy(&bytes, at, sizeof bytes);
            return (Words)__builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
        } else {
            Halves pairs;
            std::memcpy(&pairs, at, sizeof pairs);
            const Ints both = (Ints)__builtin_convertvector(pairs, Words);
            const Words low = (Words)__builtin_convertvector(both << 24 >> 24, Floats);
            const Words high = (Words)__builtin_convertvector(both << 16 >> 24, Floats);
            return low >> 16 | high;
        }
    }
    static Words words(const char* at, int64_t count) {
        char whole[W * 4 / T::size] = {};
        std::memcpy(whole, at, count);
        return words(whole);
    }
};

// Lane i of the result is the sum over the lanes of sums[i].
template <int D = W / 2>
inline Floats sum_lanes(Floats (&sums)[W]) {
#pragma GCC unroll 16
    for (int i = 0; i < D; ++i) {
        exchange<Words, D>(sums[i], sums[i + D], std::make_integer_sequence<int, W>());
        sums[i] += sums[i + D];
    }
    if constexpr (D > 1) return sum_lanes<D / 2>(sums);
    return sums[0];
}

}  // namespace
