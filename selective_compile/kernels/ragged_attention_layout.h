// Where everything of a call lies, and what each query vector sees; T, S, PAIRS, Dp, Dvp: see ragged_attention_cpu.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "int8_rows_cpu.h"
#include "ragged_attention_call.h"

namespace {

template <typename T, typename S> class Layout {
 public:
  static constexpr double LOG2E = 1.4426950408889634;
  static constexpr bool PAIRS = HAS_PAIRS && std::is_same_v<T, bf16>;
  static constexpr bool INT8 = std::is_same_v<S, int8_t>;

  explicit Layout(const Call& call)
      : call_(call), group_(call.query_heads / call.heads), depth_(round_up(call.size, W)),
        width_(round_up(call.value_size, W)), softcap_(float(call.softcap)),
        scale_(float(call.softcap > 0 ? call.scale / call.softcap : call.scale * LOG2E)) {}

  static T* tensor(char* p) { return reinterpret_cast<T*>(p); }
  static S* pool(char* p) { return reinterpret_cast<S*>(p); }

  int64_t rows(int64_t n) const { return call_.cu_seqlens_q[n + 1] - call_.cu_seqlens_q[n]; }
  int64_t context(int64_t n) const { return call_.context_lens ? call_.context_lens[n] : rows(n); }
  // The first key that a row at `position` sees.
  int64_t first_seen(int64_t position) const {
    int64_t in_window = call_.window > 0 ? position - call_.window + 1 : 0;
    int64_t in_chunk = call_.chunk > 0 ? position / call_.chunk * call_.chunk : 0;
    return std::max<int64_t>({0, in_window, in_chunk});
  }
  // The last one: its own, or one of the prefix behind it, as far as there are any yet.
  int64_t last_seen(int64_t n, int64_t position) const {
    return std::max(position, std::min(call_.prefix, context(n)) - 1);
  }
  int64_t position(int64_t n, int64_t vector) const { return context(n) - rows(n) + vector / group_; }
  int64_t head_of(const Item& item, int64_t m) const { return item.head * group_ + (item.vector + m) % group_; }
  int64_t row_of(const Item& item, int64_t m) const {
    return call_.cu_seqlens_q[item.request] + (item.vector + m) / group_;
  }
  // Whether something that depends on how far back a key is is added to its score.
  bool biased() const { return call_.slopes || call_.distance_bias; }
  float slope(const Item& item, int64_t m) const {
    return call_.slopes ? float(call_.slopes[head_of(item, m)] * LOG2E) : 0;
  }
  // What is added for each distance, or null.
  const float* distances_of(const Item& item, int64_t m) const {
    if (!call_.distance_bias) return nullptr;
    return call_.distance_bias + row_of(item, m) * call_.distance_row + head_of(item, m) * call_.distances;
  }
  float at_distance(const float* distances, int64_t distance) const {
    return float(distances[std::clamp<int64_t>(distance, 0, call_.distances - 1)] * LOG2E);
  }

  int64_t partial_size(int64_t vectors) const { return padded(vectors) * (width_ + 2); }
  State state_at(float* at, int64_t vectors) const {
    int64_t lanes = padded(vectors);
    return {at, at + lanes * width_, at + lanes * (width_ + 1)};
  }

  State state_of(const States& all, const Item& item, int64_t k) const {
    return state_at(all.first + k * all.stride, item.vectors);
  }
  static Item of_head(Item item, int64_t k) {
    item.head += k;
    return item;
  }

  const T* query_vector(const Item& item, int64_t m) const {
    return tensor(call_.query) + row_of(item, m) * call_.query_row + head_of(item, m) * call_.query_head;
  }

  // Where the keys and values of the item's first head at positions begin, ..., end - 1 lie.
  void locate(const Item& item, int64_t begin, int64_t end, const S** keys, const S** values) const {
    const int32_t* table = call_.block_table + item.request * call_.table_stride;
    int64_t first_row = call_.context_lens ? 0 : call_.cu_seqlens_q[item.request];
    while (begin < end) {
      int64_t block = 0, offset = first_row + begin, run = end - begin;
      if (call_.context_lens) {
        block = table[begin / call_.block_size];
        offset = begin % call_.block_size;
        run = std::min(run, call_.block_size - offset);
      }
      const S* key = pool(call_.key_pool) + block * call_.key_block + item.head * call_.key_block_head;
      const S* value = pool(call_.value_pool) + block * call_.value_block + item.head * call_.value_block_head;
      for (int64_t i = 0; i < run; ++i) {
        *keys++ = key + (offset + i) * call_.key_slot;
        *values++ = value + (offset + i) * call_.value_slot;
      }
      begin += run;
    }
  }

  // What rows of so many numbers are multiplied by, for those that are kept as int8.
  static void read_scales(float* to, const S** rows, int64_t count, int64_t size) {
    if constexpr (INT8)
      for (int64_t i = 0; i < count; ++i) to[i] = scale_of(rows[i], size);
  }

  // Numbers in front of the scale in a value's row.
  int64_t value_row_size() const { return values_in_keys(call_) ? call_.size : call_.value_size; }

  // A score in base 2 from a dot product.
  vf base2(vf dot) const { return softcap_ > 0 ? tanh(dot * scale_) * float(softcap_ * LOG2E) : dot * scale_; }

 protected:
  const Call& call_;
  const int64_t group_, depth_, width_;
  const float softcap_, scale_;
};

}  // namespace
