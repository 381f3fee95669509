// Attention to selected keys: lanes run along the head; a row's weights lie in the thread's scratch.
//
// heads K, size D, value_size Dv, selection [T, count], sinks and slopes [H]; output [T, H, Dv]. The unit of work is a
// row and a key/value head with the query heads that read it, so that a selected key and value are fetched for all of
// them together. Selected positions behind the row's own are not seen; -1 is no position.

#pragma once

#include <cmath>

#include "selection_call.h"

namespace {

template <typename T, typename S> class SelectedAttention {
 public:
  explicit SelectedAttention(const Call& call)
      : call_(call), keys_(call), depth_(round_up(call.size, W)), width_(round_up(call.value_size, W)),
        group_(call.query_heads / call.heads), lanes_(round_up(call.count, W)) {}

  Status run() const {
    if (Status bad = keys_.check()) return bad;
    keys_.write_pool();
    int64_t keys;
    const std::vector<Row> rows = keys_.rows(&keys);
    const int64_t items = int64_t(rows.size()) * call_.heads;
    // Waking a team costs some microseconds, as in ragged_attention_cpu.cpp.
    const int64_t work = std::min(keys, int64_t(rows.size()) * call_.count) * call_.query_heads * (depth_ + width_);
    parallel_for(call_, items, work < 400'000 ? 1 : call_.threads,
                 [&](int64_t i) { attend(rows[i / call_.heads], i % call_.heads); });
    const int64_t row = call_.query_heads * call_.value_size, used = call_.cu_seqlens_q[call_.requests];
    std::memset(static_cast<void*>(Keys<T, S>::at(call_.output, used * row)), 0, (call_.rows - used) * row * sizeof(T));
    return OK;
  }

 private:
  static constexpr double LOG2E = 1.4426950408889634;

  void attend(const Row& row, int64_t head) const {
    const int64_t per_head = depth_ + lanes_ + width_;
    float* memory = scratch_of_thread.floats(group_ * per_head + std::max(depth_, width_) + lanes_);
    float *queries = memory, *weights = queries + group_ * depth_, *sums = weights + group_ * lanes_;
    float* wide = sums + group_ * width_;
    int32_t* seen = reinterpret_cast<int32_t*>(wide + std::max(depth_, width_));
    const int32_t* selection = call_.selection + row.row * call_.count;
    int64_t n = 0;
    for (int64_t i = 0; i < call_.count; ++i)
      if (selection[i] >= 0 && selection[i] <= row.position) seen[n++] = selection[i];
    for (int64_t g = 0; g < group_; ++g) widen(queries + g * depth_, keys_.query(row, head * group_ + g), call_.size);
    for (int64_t i = 0; i < n; ++i) {
      const S* key = keys_.key(row, head, seen[i]);
      const float scale = keys_.scale(key, call_.size);
      widen(wide, key, call_.size);
      for (int64_t g = 0; g < group_; ++g)
        weights[g * lanes_ + i] =
            score(dot(queries + g * depth_, wide, depth_) * scale, head * group_ + g, seen[i] - row.position);
    }
    std::fill(sums, sums + group_ * width_, 0.f);
    float totals[1], *total_weight = group_ == 1 ? totals : memory;  // the queries are not needed any more
    for (int64_t g = 0; g < group_; ++g) total_weight[g] = normalise(weights + g * lanes_, n, head * group_ + g);
    for (int64_t i = 0; i < n; ++i) {
      const S* value = keys_.value(row, head, seen[i]);
      const float scale = keys_.scale(value, keys_.values_in_keys() ? call_.size : call_.value_size);
      widen(wide, value, call_.value_size);
      for (int64_t g = 0; g < group_; ++g) {
        const float weight = weights[g * lanes_ + i] * scale;
        for (int64_t d = 0; d < width_; d += W)
          store(sums + g * width_ + d, load(sums + g * width_ + d) + weight * load(wide + d));
      }
    }
    for (int64_t g = 0; g < group_; ++g) finish(row, head * group_ + g, sums + g * width_, total_weight[g]);
  }

  // In base 2.
  float score(float product, int64_t head, int64_t distance) const {
    float value = product * float(call_.scale);
    if (call_.softcap > 0) value = float(call_.softcap) * tanh(splat(value / float(call_.softcap)))[0];
    if (call_.slopes) value += call_.slopes[head] * float(distance);
    return value * float(LOG2E);
  }

  // Scores become weights; returns their sum, with that of a sink.
  float normalise(float* scores, int64_t n, int64_t head) const {
    const float sink = call_.sinks ? float(call_.sinks[head] * LOG2E) : -INFINITY;
    float highest = sink;
    for (int64_t i = 0; i < n; ++i) highest = std::max(highest, scores[i]);
    for (int64_t i = n; i < round_up(n, W); ++i) scores[i] = -INFINITY;
    vf sum{};
    for (int64_t i = 0; i < n; i += W) {
      const vf weight = exp2(load(scores + i) - highest);
      store(scores + i, weight);
      sum += weight;
    }
    return total(sum) + (call_.sinks ? exp2(sink - highest) : 0.f);
  }

  void finish(const Row& row, int64_t head, const float* sums, float weight) const {
    T* to = Keys<T, S>::at(call_.output, (row.row * call_.query_heads + head) * call_.value_size);
    for (int64_t d = 0; d < call_.value_size; d += W) {
      T part[W];
      store(part, load(sums + d) / weight);
      std::memcpy(static_cast<void*>(to + d), part, std::min<int64_t>(W, call_.value_size - d) * sizeof(T));
    }
  }

  const Call& call_;
  const Keys<T, S> keys_;
  const int64_t depth_, width_, group_, lanes_;
};

}  // namespace
