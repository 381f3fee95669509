// top_keys: lanes run along the head; a row's scores lie in the thread's scratch until the best are taken.
//
// heads K, size D, weights [T, H], count; output [T, count] int32. A key is widened once for the rows of a group, which
// are neighbours in one request. How a score is summed depends on nothing but the row and the key.

#pragma once

#include "selection_call.h"

namespace {

template <typename T> class TopKeys {
 public:
  explicit TopKeys(const Call& call) : call_(call), keys_(call), depth_(round_up(call.size, W)) {}

  Status run() const {
    if (Status bad = keys_.check()) return bad;
    keys_.write_pool();
    int64_t work;
    const std::vector<Row> rows = keys_.rows(&work);
    std::vector<int64_t> starts;
    for (int64_t i = 0; i < int64_t(rows.size()); ++i)
      if (starts.empty() || i - starts.back() == GROUP || rows[i].request != rows[starts.back()].request)
        starts.push_back(i);
    starts.push_back(int64_t(rows.size()));
    const int64_t groups = int64_t(starts.size()) - 1;
    // Waking a team costs some microseconds, as in ragged_attention_cpu.cpp.
    const int64_t threads = work * call_.query_heads * depth_ < 400'000 ? 1 : call_.threads;
    parallel_for(call_, groups, threads, [&](int64_t i) {
      const int64_t g = groups - 1 - i;  // those with the most keys stand last in a request
      select(rows.data() + starts[g], starts[g + 1] - starts[g]);
    });
    int32_t* out = reinterpret_cast<int32_t*>(call_.output);
    const int64_t used = call_.cu_seqlens_q[call_.requests];
    std::fill(out + used * call_.count, out + call_.rows * call_.count, -1);
    return OK;
  }

 private:
  static constexpr int64_t GROUP = 4;

  void select(const Row* rows, int64_t n) const {
    const int64_t last = rows[n - 1].position + 1, width = round_up(last, W);
    float* memory = scratch_of_thread.floats(n * (width + call_.query_heads * depth_) + call_.heads * depth_);
    float *queries = memory + n * width, *key = queries + n * call_.query_heads * depth_;
    if (last > call_.count) {
      for (int64_t r = 0; r < n; ++r)
        for (int64_t h = 0; h < call_.query_heads; ++h)
          widen(queries + (r * call_.query_heads + h) * depth_, keys_.query(rows[r], h), call_.size);
      for (int64_t j = 0; j < last; ++j) {
        for (int64_t k = 0; k < call_.heads; ++k) widen(key + k * depth_, keys_.key(rows[0], k, j), call_.size);
        for (int64_t r = 0; r < n; ++r)
          if (j <= rows[r].position)
            memory[r * width + j] = score(queries + r * call_.query_heads * depth_, key, rows[r].row);
      }
    }
    for (int64_t r = 0; r < n; ++r) take(memory + r * width, rows[r]);
  }

  float score(const float* queries, const float* key, int64_t row) const {
    const float* weights = call_.weights + row * call_.query_heads;
    const int64_t group = call_.query_heads / call_.heads;
    float sum = 0;
    for (int64_t h = 0; h < call_.query_heads; ++h) {
      const float product = dot(queries + h * depth_, key + h / group * depth_, depth_) * float(call_.scale);
      sum += weights[h] * (product < 0 ? 0.f : product);  // a NaN stays one
    }
    return sum;
  }

  void take(const float* scores, const Row& row) const {
    int32_t* out = reinterpret_cast<int32_t*>(call_.output) + row.row * call_.count;
    const int64_t seen = row.position + 1, kept = std::min(seen, call_.count);
    std::fill(out + kept, out + call_.count, -1);
    if (kept == seen) {
      for (int64_t j = 0; j < seen; ++j) out[j] = int32_t(j);
      return;
    }
    std::vector<uint64_t>& ranks = ranks_of_thread();
    ranks.resize(seen);
    for (int64_t j = 0; j < seen; ++j) ranks[j] = uint64_t(rank(scores[j])) << 32 | uint32_t(~uint32_t(j));
    std::nth_element(ranks.begin(), ranks.begin() + (kept - 1), ranks.end(), std::greater<uint64_t>());
    for (int64_t i = 0; i < kept; ++i) out[i] = int32_t(~uint32_t(ranks[i]));
    std::sort(out, out + kept);
  }

  // Ordered as the scores are; both zeros are one, a NaN is above all.
  static uint32_t rank(float score) {
    if (score != score) return UINT32_MAX;
    score += 0.f;
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }

  static std::vector<uint64_t>& ranks_of_thread() {
    static thread_local std::vector<uint64_t> ranks;
    return ranks;
  }

  const Call& call_;
  const Keys<T> keys_;
  const int64_t depth_;
};

}  // namespace
