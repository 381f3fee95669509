// Before the work: is the call sound, where do its keys and values go, which items are there to do.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "ragged_attention_layout.h"

namespace {

template <typename T, typename S> class Plan : public Layout<T, S> {
 protected:
  using Base = Layout<T, S>;
  using Base::call_, Base::group_, Base::rows, Base::context, Base::first_seen, Base::last_seen, Base::position, Base::partial_size,
      Base::tensor, Base::pool;

 public:
  using Base::Base;

  // Nothing has been written yet when this refuses: a wrong table must not become a wild store.
  Status check() const {
    if (call_.cu_seqlens_q[0] != 0 || call_.cu_seqlens_q[call_.requests] > call_.rows) return BAD_ROWS;
    for (int64_t n = 0; n < call_.requests; ++n)
      if (rows(n) < 0) return BAD_ROWS;
    if (!call_.context_lens) return OK;
    for (int64_t n = 0; n < call_.requests; ++n) {
      if (context(n) < rows(n) || context(n) > call_.max_blocks * call_.block_size) return BAD_CONTEXT;
      if (rows(n) == 0) continue;
      const int32_t* table = call_.block_table + n * call_.table_stride;
      int64_t last = (context(n) - 1) / call_.block_size;
      for (int64_t i = first_seen(context(n) - rows(n)) / call_.block_size; i <= last; ++i)
        if (table[i] < 0 || table[i] >= call_.num_blocks) return BAD_BLOCK;
    }
    for (int64_t t = 0; t < call_.rows; ++t)
      if (call_.slot_mapping[t] >= call_.num_blocks * call_.block_size) return BAD_SLOT;
    return OK;
  }

  void write_pool() const {
    auto copy = [&](int64_t t) {
      int64_t slot = call_.slot_mapping[t], block = slot / call_.block_size, offset = slot % call_.block_size;
      if (slot < 0) return;
      const T *key = tensor(call_.key) + t * call_.key_row, *value = tensor(call_.value) + t * call_.value_row;
      S* keys = pool(call_.key_pool) + block * call_.key_block + offset * call_.key_slot;
      S* values = pool(call_.value_pool) + block * call_.value_block + offset * call_.value_slot;
      for (int64_t k = 0; k < call_.heads; ++k) {
        keep(keys + k * call_.key_block_head, key + k * call_.key_head, call_.size);
        if (!values_in_keys(call_)) keep(values + k * call_.value_block_head, value + k * call_.value_head, call_.value_size);
      }
    };
    int64_t bytes = call_.rows * call_.heads * (call_.size + call_.value_size) * sizeof(T), chunk = 16;
    parallel_for(call_, (call_.rows + chunk - 1) / chunk, bytes < 256 * 1024 ? 1 : call_.threads, [&](int64_t i) {
      for (int64_t t = i * chunk; t < std::min(call_.rows, (i + 1) * chunk); ++t) copy(t);
    });
  }

  void plan() {
    const int64_t few_heads = heads_of_few();
    for (bool few : {false, true})  // the long items first
      for (int64_t n = 0; n < call_.requests; ++n) {
        int64_t vectors = rows(n) * group_;
        if (vectors == 0 || (vectors < W) != few) continue;
        const int64_t split_of_tiles = call_.heads == 1 ? ONE_HEAD_SPLIT : TILE_SPLIT;
        int64_t split = few ? FEW_SPLIT : vectors <= 4 * TILE_VECTORS ? split_of_tiles : INT32_MAX;
        int64_t heads = few ? few_heads : 1;
        for (int64_t v = (vectors - 1) / TILE_VECTORS * TILE_VECTORS; v >= 0; v -= TILE_VECTORS)
          for (int64_t k = 0; k < call_.heads; k += heads)
            plan_tile(n, k, std::min(heads, call_.heads - k), v, std::min<int64_t>(TILE_VECTORS, vectors - v), split);
      }
    splits_left_.reset(new std::atomic<int32_t>[splits_.size()]);
    for (size_t i = 0; i < splits_.size(); ++i) splits_left_[i].store(splits_[i].parts, std::memory_order_relaxed);
  }

  // Heads lie side by side in a block: as many in an item as make a long run, if that leaves items for all threads. No
  // result depends on it.
  int64_t heads_of_few() const {
    int64_t parts = 0;
    for (int64_t n = 0; n < call_.requests; ++n)
      if (int64_t vectors = rows(n) * group_; vectors > 0 && vectors < W)
        parts += (context(n) - 1) / FEW_SPLIT - first_seen(position(n, 0)) / FEW_SPLIT + 1;
    int64_t run = std::max<int64_t>(1, call_.block_size * call_.size * sizeof(S));
    int64_t heads = std::clamp<int64_t>(FEW_RUN / run, 1, call_.heads);
    while (heads > 1 && parts * (call_.heads / heads) < ITEMS * call_.threads) heads /= 2;
    return heads;
  }

  void plan_tile(int64_t n, int64_t head, int64_t heads, int64_t vector, int64_t vectors, int64_t split) {
    int64_t first = first_seen(position(n, vector)), last = last_seen(n, position(n, vector + vectors - 1));
    work_ += (last - first + 1) * (call_.size + call_.value_size) * vectors * heads;
    // Splits start at multiples of `split`, wherever the window starts, so that they are the same in every step.
    int64_t parts = last / split - first / split + 1, id = -1;
    if (parts > 1) {
      id = int64_t(splits_.size());
      for (int64_t k = 0; k < heads; ++k) {
        splits_.push_back({int32_t(parts), int32_t(vectors), partials_size_});
        partials_size_ += parts * partial_size(vectors);
      }
    }
    for (int64_t part = 0; part < parts; ++part) {
      int64_t begin = std::max(first, (first / split + part) * split);
      int64_t end = std::min(last, (first / split + part + 1) * split - 1);
      items_.push_back({int32_t(n), int32_t(head), int32_t(heads), int32_t(vector), int32_t(vectors), int32_t(begin),
                        int32_t(end), int32_t(id), int32_t(part)});
    }
  }

 protected:
  std::vector<Item> items_;
  std::vector<Split> splits_;
  std::unique_ptr<std::atomic<int32_t>[]> splits_left_;
  int64_t partials_size_ = 0, work_ = 0;
};

}  // namespace
