// What a call of the ops that select keys, or attend to selected ones, is given; is it sound; where its keys lie.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "int8_rows_cpu.h"
#include "threads_cpu.h"
#include "vectors_cpu.h"

namespace {

// Field for field what selection_cpu.py packs. Strides in elements; the last dimension of every tensor is contiguous.
struct Call {
  char *output, *query, *key, *value, *key_pool, *value_pool;  // the values null: there are none
  const int32_t *cu_seqlens_q, *context_lens, *block_table;  // context_lens null: no pool, keys are the rows themselves
  const int64_t* slot_mapping;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int64_t dtype, int8_pools, threads;  // int8_pools: rows of the pools are those of int8_rows_cpu.h
  int64_t rows, query_heads, heads, size, value_size;
  int64_t requests, block_size, num_blocks, max_blocks, table_stride;
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;
  int64_t key_block, key_block_head, key_slot, value_block, value_block_head, value_slot;
  int64_t count;             // of the keys selected for a row
  const int32_t* selection;  // [rows, count], or null
  const float *weights;      // [rows, query_heads], or null
  const float *sinks, *slopes;  // [query_heads], or null
  double scale, softcap;
};

enum Status { OK = 0, BAD_ROWS = 1, BAD_CONTEXT = 2, BAD_BLOCK = 3, BAD_SLOT = 4, BAD_DTYPE = 5 };

// Of two vectors that are padded with zeros.
inline float dot(const float* a, const float* b, int64_t n) {
  vf sum{};
  for (int64_t d = 0; d < n; d += W) sum += load(a + d) * load(b + d);
  return total(sum);
}

// One row of a request: its number in the step, its position, and the request.
struct Row { int64_t row, position, request; };

// T: of queries, rows and results; S: of the pools, the same or int8 rows.
template <typename T, typename S = T> class Keys {
 public:
  explicit Keys(const Call& call) : call_(call) {}

  // Nothing has been written yet when this refuses: a wrong table must not become a wild store.
  Status check() const {
    const int32_t* bounds = call_.cu_seqlens_q;
    if (bounds[0] != 0 || bounds[call_.requests] > call_.rows) return BAD_ROWS;
    for (int64_t n = 0; n < call_.requests; ++n)
      if (bounds[n + 1] < bounds[n]) return BAD_ROWS;
    if (!call_.context_lens) return OK;
    for (int64_t n = 0; n < call_.requests; ++n) {
      const int64_t rows = bounds[n + 1] - bounds[n], context = call_.context_lens[n];
      if (context < rows || context > call_.max_blocks * call_.block_size) return BAD_CONTEXT;
      if (rows == 0) continue;
      for (int64_t i = 0; i <= (context - 1) / call_.block_size; ++i) {
        const int32_t block = call_.block_table[n * call_.table_stride + i];
        if (block < 0 || block >= call_.num_blocks) return BAD_BLOCK;
      }
    }
    for (int64_t t = 0; t < call_.rows; ++t)
      if (call_.slot_mapping[t] >= call_.num_blocks * call_.block_size) return BAD_SLOT;
    return OK;
  }

  void write_pool() const {
    if (!call_.context_lens) return;
    for (int64_t t = 0; t < call_.rows; ++t) {
      const int64_t slot = call_.slot_mapping[t], block = slot / call_.block_size, offset = slot % call_.block_size;
      if (slot < 0) continue;
      for (int64_t k = 0; k < call_.heads; ++k) {
        S* key = kept(call_.key_pool, block * call_.key_block + k * call_.key_block_head + offset * call_.key_slot);
        keep(key, at(call_.key, t * call_.key_row + k * call_.key_head), call_.size);
        if (!call_.value || values_in_keys()) continue;
        S* value = kept(call_.value_pool, block * call_.value_block + k * call_.value_block_head + offset * call_.value_slot);
        keep(value, at(call_.value, t * call_.value_row + k * call_.value_head), call_.value_size);
      }
    }
  }

  // The values are the first numbers of the keys: written with them, and in int8 of their scale.
  bool values_in_keys() const { return call_.context_lens && call_.value_pool == call_.key_pool; }

  // All rows of requests, and how many keys they have together.
  std::vector<Row> rows(int64_t* keys) const {
    std::vector<Row> found;
    *keys = 0;
    for (int64_t n = 0; n < call_.requests; ++n) {
      const int64_t begin = call_.cu_seqlens_q[n], end = call_.cu_seqlens_q[n + 1];
      const int64_t context = call_.context_lens ? call_.context_lens[n] : end - begin;
      for (int64_t t = begin; t < end; ++t) {
        found.push_back({t, context - end + t, n});
        *keys += context - end + t + 1;
      }
    }
    return found;
  }

  const S* key(const Row& row, int64_t head, int64_t position) const {
    const auto [block, slot] = place(row, position);
    return kept(call_.key_pool, block * call_.key_block + head * call_.key_block_head + slot * call_.key_slot);
  }

  const S* value(const Row& row, int64_t head, int64_t position) const {
    const auto [block, slot] = place(row, position);
    return kept(call_.value_pool, block * call_.value_block + head * call_.value_block_head + slot * call_.value_slot);
  }

  const T* query(const Row& row, int64_t head) const {
    return at(call_.query, row.row * call_.query_row + head * call_.query_head);
  }

  static T* at(char* tensor, int64_t element) { return reinterpret_cast<T*>(tensor) + element; }

  // What a row of the pool of so many numbers is multiplied by.
  static float scale(const S* row, int64_t size) {
    if constexpr (INT8) return scale_of(row, size);
    return 1;
  }

 private:
  static constexpr bool INT8 = std::is_same_v<S, int8_t>;

  static S* kept(char* pool, int64_t element) { return reinterpret_cast<S*>(pool) + element; }

  struct Place { int64_t block, slot; };

  Place place(const Row& row, int64_t position) const {
    if (!call_.context_lens) return {0, call_.cu_seqlens_q[row.request] + position};
    return {call_.block_table[row.request * call_.table_stride + position / call_.block_size], position % call_.block_size};
  }

  const Call& call_;
};

}  // namespace
