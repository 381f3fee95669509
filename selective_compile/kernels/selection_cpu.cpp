// Sparse attention for CPUs: select the best keys of each row, and attend to the selected ones.
//
// Legend
//   row       a token of the step; its selection are positions in its request
//   W         floats in a SIMD vector
//
// Products, scores and sums are float32; rows are widened as they are read. What a row's result is depends on its own
// request alone, never on the batch or the number of threads.
//
// Reading order: selection_call (what is given), top_keys_cpu, selected_attention_cpu.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "selected_attention_cpu.h"
#include "selection_call.h"
#include "top_keys_cpu.h"

namespace {

// Keys of an indexer are never kept as int8.
template <typename T, typename> using Select = TopKeys<T>;

template <template <typename, typename> class Op> Status run(const void* packed) {
  Call call;
  std::memcpy(&call, packed, sizeof call);
  switch (call.dtype + 3 * call.int8_pools) {
    case 0: return Op<float, float>(call).run();
    case 1: return Op<bf16, bf16>(call).run();
    case 2: return Op<fp16, fp16>(call).run();
    case 3: return Op<float, int8_t>(call).run();
    case 4: return Op<bf16, int8_t>(call).run();
    case 5: return Op<fp16, int8_t>(call).run();
    default: return BAD_DTYPE;
  }
}

}  // namespace

extern "C" int selective_top_keys(const void* packed) { return run<Select>(packed); }
extern "C" int selective_selected_attention(const void* packed) { return run<SelectedAttention>(packed); }
