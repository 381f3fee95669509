// The candidates of rows of scores that are drawn from by top-k: the largest scores of each row, scaled by the row's
// temperature, in order of token id.
//
// A row is read once for the maxima of its groups, W lanes of DEPTH scores that are W apart. Each of the k largest maxima
// is a score of its own, so that no score below the k-th of them is among the k largest scores: only the groups that
// reach up to it are read again.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "threads_cpu.h"

namespace {

constexpr int64_t W = 16, DEPTH = 64, BLOCK = W * DEPTH;
typedef float Vector __attribute__((vector_size(W * 4), aligned(4)));
typedef int32_t Mask __attribute__((vector_size(W * 4)));
constexpr float NEVER = -std::numeric_limits<float>::infinity();

enum Status : int64_t { OK = 0, ASK_ALL = 1 };

struct Call {
  const float* scores;          // [S, V], rows `stride` apart
  const float* temperatures;    // [S]
  const int64_t* kept;          // [S], how many largest scores of the row stay, ties of the least included
  float* values;                // [S, C]
  int64_t* ids;                 // [S, C]
  int64_t rows, vocabulary, stride, count;  // C, more than any of `kept`, or V
  int64_t threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

struct Candidate { float score; int32_t id; };

class Row {
 public:
  Row(const Call& call, int64_t row)
      : scores_(call.scores + row * call.stride), size_(call.vocabulary), blocks_(size_ / BLOCK), call_(call), row_(row) {}

  Status run() {
    if (!find_maxima()) return ASK_ALL;
    collect(bound());
    const int64_t count = call_.count;
    if (int64_t(found().size()) < count) return ASK_ALL;
    auto larger = [](const Candidate& a, const Candidate& b) { return a.score > b.score; };
    std::nth_element(found().begin(), found().begin() + (count - 1), found().end(), larger);
    found().resize(count);
    std::sort(found().begin(), found().end(), larger);
    return write();
  }

 private:
  // False: a score is not a number, which no comparison would find.
  bool find_maxima() {
    std::vector<float>& maxima = maxima_of_thread();
    maxima.resize(blocks_ * W);
    bool sound = true;
    for (int64_t b = 0; b < blocks_; ++b) {
      const Vector* block = reinterpret_cast<const Vector*>(scores_ + b * BLOCK);
      Vector most = block[0];
      Mask strange = block[0] != block[0];
      for (int64_t d = 1; d < DEPTH; ++d) {
        const Vector score = block[d];
        strange |= score != score;
        most = score > most ? score : most;
      }
      for (int64_t l = 0; l < W; ++l) {
        maxima[b * W + l] = most[l];
        sound &= !strange[l];
      }
    }
    for (int64_t i = blocks_ * BLOCK; i < size_; ++i) sound &= scores_[i] == scores_[i];
    return sound;
  }

  // At least `count` scores are not below it.
  float bound() const {
    const int64_t count = call_.count;
    std::vector<float>& tops = tops_of_thread();
    tops.assign(maxima_of_thread().begin(), maxima_of_thread().end());
    tops.insert(tops.end(), scores_ + blocks_ * BLOCK, scores_ + size_);
    if (int64_t(tops.size()) < count) return NEVER;
    std::nth_element(tops.begin(), tops.begin() + (count - 1), tops.end(), std::greater<float>());
    return tops[count - 1];
  }

  void collect(float bound) {
    found().clear();
    const std::vector<float>& maxima = maxima_of_thread();
    auto take = [&](int64_t id) {
      if (scores_[id] >= bound) found().push_back({scores_[id], int32_t(id)});
    };
    for (int64_t b = 0; b < blocks_; ++b)
      for (int64_t l = 0; l < W; ++l)
        if (maxima[b * W + l] >= bound)
          for (int64_t d = 0; d < DEPTH; ++d) take(b * BLOCK + d * W + l);
    for (int64_t i = blocks_ * BLOCK; i < size_; ++i) take(i);
  }

  Status write() {
    const float temperature = call_.temperatures[row_];
    for (Candidate& each : found()) each.score /= temperature;
    const int64_t kept = call_.kept[row_];
    const float limit = found()[kept - 1].score;
    // The one more than asked for: whether ties reach further, those that scaling makes included.
    const bool further = call_.count > kept ? found().back().score >= limit : call_.count < size_;
    if (further && limit > NEVER) return ASK_ALL;
    std::sort(found().begin(), found().end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    for (int64_t i = 0; i < call_.count; ++i) {
      const Candidate& each = found()[i];
      call_.values[row_ * call_.count + i] = each.score < limit ? NEVER : each.score;
      call_.ids[row_ * call_.count + i] = each.id;
    }
    return OK;
  }

  static std::vector<float>& maxima_of_thread() { static thread_local std::vector<float> kept; return kept; }
  static std::vector<float>& tops_of_thread() { static thread_local std::vector<float> kept; return kept; }
  static std::vector<Candidate>& found() { static thread_local std::vector<Candidate> kept; return kept; }

  const float* scores_;
  const int64_t size_, blocks_;
  const Call& call_;
  const int64_t row_;
};

}  // namespace

// Not OK: a row has a NaN, or more candidates than there is room for; what was written is to be given up.
extern "C" int64_t selective_candidates(const Call* call) {
  std::atomic<int64_t> status{OK};
  // Waking a team costs some microseconds, as in ragged_attention_cpu.cpp.
  const int64_t threads = call->rows * call->vocabulary < 100'000 ? 1 : call->threads;
  parallel_for(*call, call->rows, threads, [&](int64_t row) {
    if (Row(*call, row).run() != OK) status.store(ASK_ALL, std::memory_order_relaxed);
  });
  return status.load();
}
