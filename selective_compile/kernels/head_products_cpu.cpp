// Rows of several heads times each head's own matrix, read where it lies: the maps on both sides of attention to latents.
//
// Legend
//   weight      [heads, size, depth]: rows of a head's matrix lie side by side, the last dimension is contiguous
//   transposed  y[t, h] = x[t, h] @ weight[h], x of `size` numbers and y of `depth`: lanes run along a row of the weight,
//               each of which is added to the sums of all rows of x, times their number for it
//   else        y[t, h] = weight[h] @ x[t, h], x of `depth` numbers and y of `size`: lanes run along the sum
//   item        the unit of work: a head and up to ITEM_ROWS rows of x, which are widened to floats first
//   T           of x, weight and y: float or bf16; sums are float32
//
// A row is summed in one order, whatever the other rows, the items and the threads. Speed: not measured.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "threads_cpu.h"
#include "vectors_cpu.h"

namespace {

// Field for field what head_products_cpu.py packs. Strides in elements.
struct Call {
  char *x, *weight, *y;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int64_t dtype, threads, transposed;
  int64_t rows, heads, size, depth;
  int64_t x_row, x_head, weight_head, weight_row;
};

constexpr int ITEM_ROWS = 24;  // a multiple of all register tiles

template <typename T> class HeadProducts {
 public:
  explicit HeadProducts(const Call& call)
      : call_(call), given_(call.transposed ? call.size : call.depth), made_(call.transposed ? call.depth : call.size),
        given_pad_(round_up(given_, W)), made_pad_(round_up(made_, W)), depth_pad_(round_up(call.depth, W)) {}

  void run() const {
    const int64_t blocks = (call_.rows + ITEM_ROWS - 1) / ITEM_ROWS;
    // Waking a team costs some microseconds, as in ragged_attention_cpu.cpp.
    const int64_t work = call_.rows * call_.heads * call_.size * call_.depth;
    parallel_for(call_, blocks * call_.heads, work < 400'000 ? 1 : call_.threads,
                 [&](int64_t i) { item(i / blocks, i % blocks * ITEM_ROWS); });
  }

 private:
  void item(int64_t head, int64_t first) const {
    const int64_t rows = std::min<int64_t>(ITEM_ROWS, call_.rows - first);
    float* x = scratch_of_thread.floats(ITEM_ROWS * (given_pad_ + made_pad_) + 4 * depth_pad_);
    float *y = x + ITEM_ROWS * given_pad_, *copy = y + ITEM_ROWS * made_pad_;
    for (int64_t t = 0; t < rows; ++t)
      widen(x + t * given_pad_, at(call_.x) + (first + t) * call_.x_row + head * call_.x_head, given_);
    const T* weight = at(call_.weight) + head * call_.weight_head;
    if (call_.transposed) add_rows(weight, x, y, rows);
    else sum_rows(weight, x, y, rows, copy);
    for (int64_t t = 0; t < rows; ++t) narrow(at(call_.y) + ((first + t) * call_.heads + head) * made_, y + t * made_pad_);
  }

  // y[t] = sum over i of x[t][i] * weight[i]
  void add_rows(const T* weight, const float* x, float* y, int64_t rows) const {
    constexpr int J = 4, R = W == 16 ? 6 : 2;  // 24 or 8 accumulators
    int64_t d = 0;
    for (; d + J * W <= call_.depth; d += J * W)
      for (int64_t t = 0; t < rows; t += R) add_tile<R, J>(weight + d, x + t * given_pad_, y + t * made_pad_ + d, rows - t, W);
    for (; d < call_.depth; d += W)
      for (int64_t t = 0; t < rows; t += R)
        add_tile<R, 1>(weight + d, x + t * given_pad_, y + t * made_pad_ + d, rows - t, std::min<int64_t>(W, call_.depth - d));
  }

  // Fewer than R rows go by halves. The next columns of a row of the weight are prefetched: rows are far apart, so that the
  // hardware sees no stream.
  template <int R, int J>
  void add_tile(const T* weight, const float* x, float* y, int64_t rows, int64_t lanes) const {
    if (rows < R) {
      if constexpr (R > 1) {
        add_tile<R / 2, J>(weight, x, y, rows, lanes);
        if (rows > R / 2) add_tile<R / 2, J>(weight, x + R / 2 * given_pad_, y + R / 2 * made_pad_, rows - R / 2, lanes);
      }
      return;
    }
    vf sum[R][J] = {};
    for (int64_t i = 0; i < call_.size; ++i, weight += call_.weight_row) {
      vf row[J];
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) row[j] = lanes == W ? load(weight + j * W) : load_some(weight, lanes);
      for (int line = 0; line < J * W * int(sizeof(T)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(weight + J * W) + line);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        vf number = splat(x[r * given_pad_ + i]);
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) sum[r][j] += number * row[j];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) store(y + r * made_pad_ + j * W, sum[r][j]);
  }

  // y[t][i] = weight[i] . x[t]
  void sum_rows(const T* weight, const float* x, float* y, int64_t rows, float* copy) const {
    for (int64_t i = 0; i < call_.size; i += 4) {
      const T* four[4];
      for (int k = 0; k < 4; ++k) four[k] = weight + std::min(i + k, call_.size - 1) * call_.weight_row;
      const bool direct = call_.depth % W == 0;
      if (!direct)
        for (int k = 0; k < 4; ++k) widen(copy + k * depth_pad_, four[k], call_.depth);
      const float* copies[4] = {copy, copy + depth_pad_, copy + 2 * depth_pad_, copy + 3 * depth_pad_};
      for (int64_t t = 0; t < rows; t += 4) {
        if (direct) sum_tiles(four, x + t * given_pad_, y + t * made_pad_ + i, rows - t);
        else sum_tiles(copies, x + t * given_pad_, y + t * made_pad_ + i, rows - t);
      }
    }
  }

  template <typename S> void sum_tiles(const S* const* weight, const float* x, float* y, int64_t rows) const {
    switch (std::min<int64_t>(4, rows)) {
      case 1: return sum_tile<1>(weight, x, y);
      case 2: return sum_tile<2>(weight, x, y);
      case 3: return sum_tile<3>(weight, x, y);
      default: return sum_tile<4>(weight, x, y);
    }
  }

  // y is padded to a multiple of W, so that four results fit at any multiple of 4.
  template <int M, typename S> void sum_tile(const S* const* weight, const float* x, float* y) const {
    vf sum[M][4] = {};
    for (int64_t d = 0; d < depth_pad_; d += W) {
      vf row[4] = {load(weight[0] + d), load(weight[1] + d), load(weight[2] + d), load(weight[3] + d)};
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        vf number = load(x + m * given_pad_ + d);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) sum[m][k] += number * row[k];
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) sum4(y + m * made_pad_, sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
  }

  void narrow(T* to, const float* from) const {
    int64_t d = 0;
    for (; d + W <= made_; d += W) store(to + d, load(from + d));
    if (d == made_) return;
    T tail[W];
    store(tail, load(from + d));
    std::memcpy(static_cast<void*>(to + d), tail, (made_ - d) * sizeof(T));
  }

  static vf load_some(const T* from, int64_t count) {
    T some[W] = {};
    std::memcpy(static_cast<void*>(some), from, count * sizeof(T));
    return load(some);
  }

  static T* at(char* tensor) { return reinterpret_cast<T*>(tensor); }

  const Call& call_;
  const int64_t given_, made_, given_pad_, made_pad_, depth_pad_;
};

}  // namespace

extern "C" int selective_head_products(const void* packed) {
  Call call;
  std::memcpy(&call, packed, sizeof call);
  if (call.dtype) HeadProducts<bf16>(call).run();
  else HeadProducts<float>(call).run();
  return 0;
}
