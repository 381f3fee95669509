// Ragged attention for CPUs: write this step's keys and values into the pool, then attend per request.
//
// Legend
//   query vector  one (row, query head of a group); vector m of a request and key/value head is row m / G, head m % G.
//                 The G heads that share a key/value head are served by the same load of a key and of a value
//   item          the unit of work: up to TILE_VECTORS query vectors of one request and key/value head, over a run of keys;
//                 in the few kernel, of several heads, whose keys lie side by side
//   split         a query tile whose keys are divided among several items; the last of them to finish merges the partials
//   few, tile     the two kernels. few: under W query vectors, lanes run along the head, keys stream from memory (decode).
//                 tile: lanes run along the query vectors, keys and values are copied tile by tile (prefill)
//   T, S          of queries, rows and results: float, bf16, fp16; of the pools: the same, or int8 rows with a scale each
//   PAIRS         lanes hold two bfloat16 instead of one float, and the multiply-add is the machine's bf16 dot product; in
//                 the tile kernel those of a matrix unit, where there is one
//   W             floats in a SIMD vector;  Dp, Dvp: head sizes rounded up to W
//
// Scores are kept in base 2 (scale times log2 e), online softmax and sums in float32. How a request is cut into tiles and
// splits depends on that request alone, never on the batch or the number of threads: its result is the same in every batch.
// Threads take items from a shared counter, longest first; the team is torch's own OpenMP runtime, called through the
// pointer that Python passes: a second runtime would fight it for the cores.
//
// Keys and values in int8 become floats, or bf16 where lanes hold pairs, as they are loaded or copied; the scale of a key is
// applied to its scores, that of a value to its weights.
//
// Reading order: _call (what is given), _plan (the items), this file (an item from start to finish), _layout (where
// things lie), _few and _tile (the kernels), _matrix (products by matrix units), vectors_cpu (what they are written in).

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ragged_attention_call.h"
#include "ragged_attention_few.h"
#include "ragged_attention_plan.h"
#include "ragged_attention_tile.h"

namespace {

template <typename T, typename S> class Attention : Plan<T, S> {
  using Base = Plan<T, S>;
  using Base::call_, Base::group_, Base::width_, Base::LOG2E, Base::rows, Base::head_of, Base::row_of, Base::tensor,
      Base::partial_size, Base::state_at, Base::state_of, Base::of_head, Base::items_, Base::splits_, Base::splits_left_,
      Base::partials_size_, Base::work_, Base::check, Base::write_pool, Base::plan;

 public:
  explicit Attention(const Call& call) : Plan<T, S>(call), few_(call), tile_(call) {}

  Status run() {
    if (Status bad = check()) return bad;
    if (call_.context_lens) write_pool();
    plan();
    partials_ = partials_of_caller.floats(partials_size_);
    // Waking a team costs some microseconds; this much work takes one thread 10 to 20 (measured on a Zen 5).
    int64_t threads = work_ < 400'000 ? 1 : call_.threads;
    parallel_for(call_, int64_t(items_.size()), threads, [&](int64_t i) { run_item(items_[i]); });
    T* out = reinterpret_cast<T*>(call_.output);
    int64_t row = call_.query_heads * call_.value_size, used = call_.cu_seqlens_q[call_.requests];
    std::memset(static_cast<void*>(out + used * row), 0, (call_.rows - used) * row * sizeof(T));
    return OK;
  }

 private:
  void run_item(const Item& item) {
    int64_t lanes = padded(item.vectors), own = partial_size(item.vectors), states = item.heads * own;
    bool few = rows(item.request) * group_ < W;
    int64_t scratch = few ? few_.scratch(item.heads, item.vectors) : tile_.scratch(lanes);
    float* memory = scratch_of_thread.floats(states + scratch);
    States all{memory, own};
    if (item.split >= 0) all = {partial(item.split, item.part), splits_[item.split].parts * own};
    for (int64_t k = 0; k < item.heads; ++k)
      begin(of_head(item, k), few ? item.vectors : lanes, state_of(all, item, k));
    if (few) few_.attend(item, all, memory + states);
    else tile_.attend(item, state_of(all, item, 0), memory + states);
    for (int64_t k = 0; k < item.heads; ++k) {
      State state = state_of(all, item, k);
      if (item.split >= 0) {
        if (splits_left_[item.split + k].fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
        state = merge(item.split + k, state_at(memory + k * own, item.vectors));
      }
      finish(of_head(item, k), state);
    }
  }

  void begin(const Item& item, int64_t lanes, State state) const {
    std::fill(state.sums, state.sums + lanes * width_, 0.f);
    std::fill(state.largest, state.largest + padded(item.vectors), -INFINITY);
    std::fill(state.weight, state.weight + padded(item.vectors), 0.f);
    if (call_.sinks && item.part == 0)  // one more key of weight 1, counted once
      for (int64_t m = 0; m < item.vectors; ++m) {
        state.largest[m] = float(call_.sinks[row_of(item, m) * call_.sink_row + head_of(item, m)] * LOG2E);
        state.weight[m] = 1;
      }
  }

  float* partial(int64_t split, int64_t part) const {
    return partials_ + splits_[split].partial + part * partial_size(splits_[split].vectors);
  }

  State merge(int64_t split, State merged) const {
    const Split& whole = splits_[split];
    for (int64_t m = 0; m < whole.vectors; ++m) {
      float largest = -INFINITY, weight = 0;
      for (int64_t p = 0; p < whole.parts; ++p)
        largest = std::max(largest, state_at(partial(split, p), whole.vectors).largest[m]);
      float* sums = merged.sums + m * width_;
      std::fill(sums, sums + width_, 0.f);
      for (int64_t p = 0; p < whole.parts; ++p) {
        State part = state_at(partial(split, p), whole.vectors);
        float factor = exp2(part.largest[m] - largest);
        weight += factor * part.weight[m];
        for (int64_t d = 0; d < width_; d += W)
          store(sums + d, load(sums + d) + factor * load(part.sums + m * width_ + d));
      }
      merged.weight[m] = weight;
    }
    return merged;
  }

  void finish(const Item& item, State state) const {
    for (int64_t m = 0; m < item.vectors; ++m) {
      T* to = tensor(call_.output) + (row_of(item, m) * call_.query_heads + head_of(item, m)) * call_.value_size;
      const float* sums = state.sums + m * width_;
      float factor = 1 / state.weight[m];
      int64_t d = 0;
      for (; d + W <= call_.value_size; d += W) store(to + d, load(sums + d) * factor);
      if (d == call_.value_size) continue;
      T tail[W];
      store(tail, load(sums + d) * factor);
      std::memcpy(static_cast<void*>(to + d), tail, (call_.value_size - d) * sizeof(T));
    }
  }

  const FewKernel<T, S> few_;
  const TileKernel<T, S> tile_;
  float* partials_ = nullptr;
};

template <typename T> Status run(const Call& call) {
  return call.int8_pools ? Attention<T, int8_t>(call).run() : Attention<T, T>(call).run();
}

}  // namespace

extern "C" int selective_attention(const void* packed) {
  Call call;
  std::memcpy(&call, packed, sizeof call);
  switch (call.dtype) {
    case 0: return run<float>(call);
    case 1: return run<bf16>(call);
    case 2: return run<fp16>(call);
    default: return BAD_DTYPE;
  }
}
