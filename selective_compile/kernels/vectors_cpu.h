// SIMD vectors of floats for CPU kernels: float32, bfloat16, float16 and int8 in memory, sums across lanes, exp2, tanh.
//
// Vectors are GCC vector extensions, with intrinsics where these are faster: one source serves AVX-512, AVX2, SSE2 and
// other machines.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int W = 16;
constexpr int PANEL = 4;  // vectors of lanes in a register tile of the tile kernel: 24 accumulators of 32 registers
#else
constexpr int W = 8;
constexpr int PANEL = 2;  // 12 accumulators of 16 registers
#endif
constexpr int ACCUMULATORS = W == 16 ? 24 : 12;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef int8_t vb __attribute__((vector_size(W)));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

template <typename V, typename S> inline V read(const S* from) { V v; std::memcpy(&v, from, sizeof v); return v; }
template <typename V, typename S> inline void write(S* to, V v) { std::memcpy(to, &v, sizeof v); }
inline vf splat(float x) { return x - vf{}; }  // of zero, too, and without the addition that `vf{} + x` is
inline vi splat(int32_t x) { return vi{} + x; }
inline vf select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
inline vf larger(vf a, vf b) { return select(a > b, a, b); }

inline vf load(const float* p) { return read<vf>(p); }
#if defined(__AVX512F__) && defined(__AVX512BW__)
inline vf load(const bf16* p) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(read<__m256i>(p)), 16); }
#else
inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(read<vh>(p), vu) << 16); }
#endif
inline void store(float* p, vf v) { write(p, v); }
inline void store(bf16* p, vf v) {
  vu bits = (vu)v;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vu kept = (vu)(v == v);
  write((uint16_t*)p, __builtin_convertvector((rounded & kept) | ((vu{} + 0x7fc0) & ~kept), vh));
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
inline vf load(const fp16* p) { return (vf)_mm512_cvtph_ps(read<__m256i>(p)); }
inline void store(fp16* p, vf v) { write(p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__F16C__) && defined(__AVX__)
inline vf load(const fp16* p) { return (vf)_mm256_cvtph_ps(read<__m128i>(p)); }
inline void store(fp16* p, vf v) { write(p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT)); }
#else
// Every binary16 number is exact in binary32 once its exponent is shifted by the factor 2^112 (subnormals included).
inline vf load(const fp16* p) {
  vu h = __builtin_convertvector(read<vh>(p), vu), magnitude = (h & 0x7fff) << 13;
  vf value = (vf)magnitude * 0x1p112f;
  vf special = (vf)(magnitude | 0x7f800000);
  return (vf)((vu)select((vi)((h & 0x7c00) == 0x7c00), special, value) | (h & 0x8000) << 16);
}
inline void store(fp16* p, vf v) {
  vu bits = (vu)v, sign = bits >> 16 & 0x8000;
  vf magnitude = (vf)(bits & 0x7fffffff);
  // Adding 1.5 * 2^23 units of the last binary16 place rounds to nearest even there; below 2^-14 that place is 2^-24.
  vu exponent = (vu)larger(magnitude, splat(0x1p-14f)) & 0x7f800000;
  vf shift = (vf)(exponent + (13u << 23)) * 1.5f;
  vf rounded = (magnitude + shift) - shift;
  vu half = (vu)(rounded * 0x1p-112f) >> 13;
  half = (vu)select(magnitude >= splat(65520.f), (vf)(vu{} + 0x7c00), (vf)half);
  half = (vu)select(magnitude == magnitude, (vf)half, (vf)(vu{} + 0x7e00));
  write((uint16_t*)p, __builtin_convertvector(half | sign, vh));
}
#endif

// Two instructions a vector, which keeps up with memory: a quarter of the bytes of floats come through.
#if defined(__AVX512F__) && defined(__AVX512BW__)
inline vf load(const int8_t* p) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(p))); }
#elif defined(__AVX2__)
inline vf load(const int8_t* p) {
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
#else
inline vf load(const int8_t* p) { return __builtin_convertvector(__builtin_convertvector(read<vb>(p), vi), vf); }
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
constexpr bool HAS_PAIRS = true;
inline vf pair_dot(vf sum, vf a, vf b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
inline vf make_pairs(vf low, vf high) {
  vu a = (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)low));
  vu b = (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)high));
  return (vf)(a | b << 16);
}
// Word d: number d of one row, then of the other.
inline vf make_pairs(const bf16* low, const bf16* high) {
  alignas(64) static constexpr uint16_t ORDER[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  __m512i a = _mm512_castsi256_si512(read<__m256i>(low)), b = _mm512_castsi256_si512(read<__m256i>(high));
  return (vf)_mm512_permutex2var_epi16(a, read<__m512i>(ORDER), b);
}
// W numbers rounded to half as many words, neighbours together.
inline void store_pairs(float* to, vf v) { write(to, _mm512_cvtneps_pbh((__m512)v)); }
#else
constexpr bool HAS_PAIRS = false;
inline vf pair_dot(vf sum, vf, vf) { return sum; }
inline vf make_pairs(vf low, vf) { return low; }
inline void store_pairs(float* to, vf v) { store(to, v); }
#endif

// A value that is used several times, held in a register: GCC would load it again as the operand of every multiply-add.
inline vf pinned(vf v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX__)
  asm("" : "+x"(v));
#endif
  return v;
}

template <bool PAIRS> inline vf multiply_add(vf sum, vf a, vf b) {
  if constexpr (PAIRS) return pair_dot(sum, a, b);
  return sum + a * b;
}

// The sums of four vectors, in order.
inline void sum4(float* to, vf a, vf b, vf c, vf d) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX__)
  __m256 all = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  const vf vectors[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    to[i] = 0;
    for (int lane = 0; lane < W; ++lane) to[i] += vectors[i][lane];
  }
#endif
}

inline float largest(vf v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float x = v[0];
  for (int lane = 1; lane < W; ++lane) x = v[lane] > x ? v[lane] : x;
  return x;
#endif
}

inline vi lanes() {
  vi v{};
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

inline float total(vf v) {
  float sums[4];
  sum4(sums, v, v, v, v);
  return sums[0];
}

// 2^x for x <= 0, relative error 1e-7; 0 below 2^-125. Minimax polynomial on [-1/2, 1/2].
inline vf exp2(vf x) {
  vf shifted = x + 12582912.f;  // 1.5 * 2^23: the integer part lands in the low bits
  vf f = x - (shifted - 12582912.f);
  vf p = splat(1.53533606e-4f);
  p = p * f + 1.33988749e-3f;
  p = p * f + 9.61843737e-3f;
  p = p * f + 5.55033247e-2f;
  p = p * f + 2.40226479e-1f;
  p = p * f + 6.93147203e-1f;
  p = p * f + 1.f;
  vf power = (vf)(((vi)shifted + (127 - 0x4b400000)) << 23);
  return select(x < -125.f, vf{}, p * power);
}

inline float exp2(float x) { return exp2(splat(x))[0]; }

// tanh, relative error 2e-7: odd minimax polynomial below 5/8, by exp2 above.
inline vf tanh(vf x) {
  vf magnitude = (vf)((vi)x & 0x7fffffff), square = x * x;
  vf p = splat(-5.71704e-3f);
  p = p * square + 2.065058e-2f;
  p = p * square - 5.37435e-2f;
  p = p * square + 1.3331491e-1f;
  p = p * square - 3.3333284e-1f;
  vf near = magnitude + magnitude * square * p;
  vf e = exp2(magnitude * -2.885390082f);  // exp(-2 |x|)
  vf value = select(magnitude < 0.625f, near, (1.f - e) / (1.f + e));
  return (vf)((vi)value | ((vi)x & (int32_t)0x80000000));
}

// n elements as floats, and zeros up to n rounded up to W.
template <typename T> void widen(float* to, const T* from, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  if (i == n) return;
  T tail[W] = {};
  std::memcpy(static_cast<void*>(tail), from + i, (n - i) * sizeof(T));
  store(to + i, load(tail));
}

}  // namespace
