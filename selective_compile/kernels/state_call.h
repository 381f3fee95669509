// What a call of an op with a state is given, the rows and slots as a kernel reads them, and the requests it serves.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "threads_cpu.h"
#include "vectors_cpu.h"

namespace {

// A tensor with a row for each token: [T, heads, size] or [T, size]. Strides in elements; a vector of it is contiguous.
struct Rows { const char* data; int64_t dtype, row, head; };

// Field for field what state_cpu.py packs.
struct Call {
  Rows inputs[5];
  const float* parameters[2];  // contiguous; the second may be null
  char *output, *pool;         // output contiguous, of the dtype of the op's result; pool null: all requests are fresh
  int64_t output_dtype, slot_bytes, slots;  // slot_bytes: from a slot to the next; within a slot the pool is contiguous
  const int32_t *cu_seqlens_q, *context_lens;
  const int64_t* state_slots;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int64_t threads, op, rows, requests;
  int64_t heads, groups, size, value_size, flag;  // what each op makes of them stands in its file
  double scale, extra;
};

enum Status { OK = 0, BAD_ROWS = 1, BAD_CONTEXT = 2, BAD_SLOT = 3, BAD_OP = 4 };

struct Request {
  int64_t begin, rows;
  char* slot;  // null without a pool
  bool fresh;

  // The part of the slot from `offset` floats on, as it was before this step; null: zero.
  const float* before(int64_t offset) const { return fresh ? nullptr : reinterpret_cast<float*>(slot) + offset; }
  float* after(int64_t offset) const { return slot ? reinterpret_cast<float*>(slot) + offset : nullptr; }
};

inline int64_t bytes_of(int64_t dtype) { return dtype == 0 ? 4 : 2; }

template <typename Body> void with_dtype(int64_t dtype, const Body& body) {
  if (dtype == 0) body(float{});
  else if (dtype == 1) body(bf16{});
  else body(fp16{});
}

// n floats as elements; reads them up to n rounded up to W.
template <typename T> void narrow(T* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  if (i == n) return;
  T tail[W];
  store(tail, load(from + i));
  std::memcpy(static_cast<void*>(to + i), tail, (n - i) * sizeof(T));
}

// Elements first .. first + n of a vector as floats, and zeros up to n rounded up to W.
inline void read_row(float* to, const Rows& rows, int64_t token, int64_t head, int64_t first, int64_t n) {
  int64_t at = token * rows.row + head * rows.head + first;
  with_dtype(rows.dtype, [&](auto element) {
    widen(to, reinterpret_cast<const decltype(element)*>(rows.data) + at, n);
  });
}

inline float read_one(const Rows& rows, int64_t token, int64_t at) {
  alignas(64) float one[W];
  read_row(one, rows, token, 0, at, 1);
  return one[0];
}

// To element `at` of the contiguous output and those behind it.
inline void write_row(const Call& call, int64_t at, const float* from, int64_t n) {
  with_dtype(call.output_dtype, [&](auto element) {
    narrow(reinterpret_cast<decltype(element)*>(call.output) + at, from, n);
  });
}

// 2^x for any x, relative error 1e-7: 0 and infinite where it is, and NaN stays.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
inline vf exp2_any(vf x) {
  const vf f = (vf)_mm512_reduce_ps((__m512)x, 0);  // x less the nearest whole number; 0 of an infinite x
  vf p = splat(1.53533606e-4f);  // as exp2
  p = p * f + 1.33988749e-3f;
  p = p * f + 9.61843737e-3f;
  p = p * f + 5.55033247e-2f;
  p = p * f + 2.40226479e-1f;
  p = p * f + 6.93147203e-1f;
  p = p * f + 1.f;
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)(x - f));
}
#else
inline vf exp2_any(vf x) { return exp2(select(x > 128.f, splat(128.f), x)); }
#endif
constexpr float LOG2E = 1.44269504f;

// Channels of a block: at most `most`, for long pieces of rows are fetched ahead, but fewer where threads would have none.
inline int64_t channels_of_block(const Call& call, int64_t channels, int64_t most) {
  return std::max<int64_t>(64, std::min(most, round_up(channels / call.threads, 64)));
}

// A state [count, size] between the pool, where its rows are `stride` apart, and a scratch, where they are `width` apart
// and rounded up to W.
inline void load_state(float* to, const float* from, int64_t count, int64_t size, int64_t width, int64_t stride) {
  if (!from) return std::fill(to, to + count * width, 0.f), void();
  for (int64_t i = 0; i < count; ++i) widen(to + i * width, from + i * stride, size);
}

inline void keep_state(float* to, const float* from, int64_t count, int64_t size, int64_t width, int64_t stride) {
  if (!to) return;
  for (int64_t i = 0; i < count; ++i) narrow(to + i * stride, from + i * width, size);
}

}  // namespace
