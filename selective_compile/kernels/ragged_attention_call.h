// What a call of ragged attention is given, how its work is cut into items, and what is kept between them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "threads_cpu.h"
#include "vectors_cpu.h"

namespace {

// Field for field what ragged_attention_cpu.py packs. Strides in elements; the last dimension of every tensor is contiguous.
struct Call {
  char *output, *query, *key, *value, *key_pool, *value_pool;
  const int32_t *cu_seqlens_q, *context_lens, *block_table;  // context_lens null: no pool, keys are the rows themselves
  const int64_t* slot_mapping;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int64_t dtype, int8_pools, matrix_unit, threads;  // int8_pools: rows of the pools are those of int8_rows_cpu.h;
                                                    // matrix_unit: whether one may be used, where there is one
  int64_t rows, query_heads, heads, size, value_size;
  int64_t requests, block_size, num_blocks, max_blocks, table_stride;
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;
  int64_t key_block, key_block_head, key_slot, value_block, value_block_head, value_slot;
  int64_t window, chunk, prefix;
  const float *sinks, *slopes;  // [query_heads], or null; sinks [rows, query_heads] with a sink_row above 0
  const float* distance_bias;   // [rows, query_heads, distances], with a distance_row of 0 the same for all rows; or null
  int64_t distance_row, distances, sink_row;
  double scale, softcap;
};

// The values are the first numbers of the keys: written with them, and in int8 of their scale.
inline bool values_in_keys(const Call& call) { return call.context_lens && call.value_pool == call.key_pool; }

enum Status { OK = 0, BAD_ROWS = 1, BAD_CONTEXT = 2, BAD_BLOCK = 3, BAD_SLOT = 4, BAD_DTYPE = 5 };

constexpr int TILE_VECTORS = 64;   // query vectors of a tile
constexpr int FEW_KEYS = 32;       // keys of an iteration of the few kernel
constexpr int TILE_KEYS = 96;      // keys of an iteration of the tile kernel: a multiple of every register tile
constexpr int FEW_SPLIT = 512;     // keys of an item of the few kernel
constexpr int FEW_RUN = 32 << 10;  // bytes of a block's keys that an item reads at once, all heads: two threads of a Zen 4
                                   // get 16 GB/s from runs of 4 KB in random order, 23 from 16 KB and 29 from 32 KB
constexpr int ITEMS = 4;           // at least so many for each thread, so that all are busy to the end
constexpr int TILE_SPLIT = 1920;   // keys of an item of the tile kernel, where one request has few tiles
constexpr int ONE_HEAD_SPLIT = 480;  // the same where all heads read one: a request that decodes has no other items. To
                                   // write and merge what 64 query vectors come to is 1 % of the products by count

struct Item {
  int32_t request, head, heads;
  int32_t vector, vectors;   // first query vector and their number
  int32_t first_key, last_key;
  int32_t split, part;       // split: of the first head; -1: alone; part 0 is the first in any case
};

struct Split {
  int32_t parts, vectors;
  int64_t partial;  // offset of part 0 in the partials
};

// Running softmax of some query vectors: unnormalised sums [vectors, Dvp], largest score and sum of weights.
struct State { float *sums, *largest, *weight; };

// Those of an item's heads: of the first, and how many floats further the next one is.
struct States { float* first; int64_t stride; };

// Lanes that so many query vectors take.
inline int64_t padded(int64_t vectors) { return round_up(vectors, W); }

thread_local Scratch partials_of_caller;

}  // namespace
