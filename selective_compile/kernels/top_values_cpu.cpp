// The k largest of each row and their places, as `torch.topk` gives them on a CPU, sorted, to the place: of equal values
// it keeps those that a partial sort, or a partition and a sort, of C++'s library leave in front, and so does this.
//
// It serves what chooses few of few values for each token, as experts.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "scores_cpu.h"
#include "threads_cpu.h"

namespace {

struct Call {
  const void* x;    // [rows, n]
  void* values;     // [rows, k]
  int64_t* places;  // [rows, k]
  int64_t rows, n, k, dtype;  // 0: float32, 1: bfloat16
  int64_t threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

using Entry = std::pair<float, int64_t>;

// A NaN is larger than all.
bool larger(const Entry& one, const Entry& other) {
  const bool none = one.first != one.first, others_none = other.first != other.first;
  return (none && !others_none) || one.first > other.first;
}

template <typename T>
void row_of(const Call& p, int64_t row, std::vector<Entry>& entries) {
  const T* x = static_cast<const T*>(p.x) + row * p.n;
  entries.resize(p.n);
  for (int64_t i = 0; i < p.n; ++i) entries[i] = {value(x[i]), i};
  const auto begin = entries.begin(), end = entries.end();
  if (p.k * 64 <= p.n) {
    std::partial_sort(begin, begin + p.k, end, larger);
  } else {
    std::nth_element(begin, begin + p.k - 1, end, larger);
    std::sort(begin, begin + p.k - 1, larger);
  }
  for (int64_t i = 0; i < p.k; ++i) {
    static_cast<T*>(p.values)[row * p.k + i] = x[entries[i].second];
    p.places[row * p.k + i] = entries[i].second;
  }
}

}  // namespace

// 0 < k <= n.
extern "C" int64_t selective_top_values(const Call* call) {
  // Waking a team costs some microseconds, as in ragged_attention_cpu.cpp.
  const int64_t threads = call->rows * call->n < 10'000 ? 1 : call->threads;
  parallel_for(*call, call->rows, threads, [&](int64_t row) {
    static thread_local std::vector<Entry> entries;
    call->dtype == 0 ? row_of<float>(*call, row, entries) : row_of<uint16_t>(*call, row, entries);
  });
  return 0;
}
