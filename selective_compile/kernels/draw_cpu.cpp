// One draw from each row of scores by temperature, top-k, top-p and min-p, as transformers' warpers leave the row; and
// the fractions that draws are made with.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "largest_scores_cpu.h"
#include "philox_cpu.h"
#include "threads_cpu.h"

namespace {

struct Wanted {
  float temperature, rest;  // 1 - top_p; 0: all stay
  double min_p;
  int64_t top_k;  // at least 1
};

struct Call {
  const float* scores;      // [S, V], rows `stride` apart
  const Wanted* wanted;     // [S]
  const double* fractions;  // [S] in [0, 1]: where in the sum of the weights a row is drawn from
  int64_t* ids;             // [S]; -1: no token is left
  int64_t rows, vocabulary, stride;
  int64_t threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

bool less_likely(const Candidate& a, const Candidate& b) {
  return a.score < b.score || (a.score == b.score && a.id < b.id);
}

class Row {
 public:
  Row(const Call& call, int64_t row)
      : scores_(call.scores + row * call.stride), size_(call.vocabulary), wanted_(call.wanted[row]),
        fraction_(call.fractions[row]) {}

  int64_t draw() {
    if (!keep_top_k()) return -1;
    weigh();
    if (wanted_.rest > 0) remove_above_top_p();
    if (wanted_.min_p > 0) remove_below_min_p();
    return choose();
  }

 private:
  // Whatever is not less than the k-th largest scaled score stays, its ties included, also those that scaling makes.
  bool keep_top_k() {
    const int64_t kept = std::min(wanted_.top_k, size_);
    LargestScores& largest = largest_of_thread();
    if (!largest.find(scores_, size_, std::min(kept + 1, size_))) return false;
    auto larger = [](const Candidate& a, const Candidate& b) { return a.score > b.score; };
    auto end = found().begin() + kept;
    std::nth_element(found().begin(), end - 1, found().end(), larger);
    const float limit = end[-1].score / wanted_.temperature;
    // Where fewer than asked for are possible at all, the limit is -inf, and no tie with it matters.
    const bool tied = end != found().end() && limit > NEVER &&
                      std::min_element(end, found().end(), larger)->score / wanted_.temperature >= limit;
    if (tied) largest.find_scaled(limit, wanted_.temperature);
    else found().resize(kept);
    return true;
  }

  void weigh() {
    float most = NEVER;
    for (Candidate& each : found()) most = std::max(most, each.score /= wanted_.temperature);
    for (Candidate& each : found()) each.weight = std::exp(double(each.score) - double(most));
  }

  // Those outside of the smallest set of the likeliest that has so much of the weight; compared in float32, whose
  // rounding decides where probabilities are equal by construction. Of equal ones those with the larger ids stay.
  void remove_above_top_p() {
    std::sort(found().begin(), found().end(), less_likely);
    double total = 0, sum = 0;
    for (const Candidate& each : found()) total += each.weight;
    auto end = found().begin();
    while (end + 1 != found().end() && float((sum += end->weight) / total) <= wanted_.rest) ++end;
    found().erase(found().begin(), end);
  }

  void remove_below_min_p() {
    auto less = [&](const Candidate& each) { return each.weight < wanted_.min_p; };
    found().erase(std::remove_if(found().begin(), found().end(), less), found().end());
  }

  // By running sums in order of token id; of a product that is rounded up to the total, the token where it is reached.
  int64_t choose() {
    std::sort(found().begin(), found().end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    double total = 0, sum = 0;
    for (const Candidate& each : found()) total += each.weight;
    if (!(total > 0)) return -1;  // not a number where the likeliest token has -inf or inf
    const double threshold = fraction_ * total;
    for (const Candidate& each : found()) {
      sum += each.weight;
      if (sum > threshold || sum >= total) return each.id;
    }
    return -1;
  }

  static LargestScores& largest_of_thread() { static thread_local LargestScores kept; return kept; }
  static std::vector<Candidate>& found() { return largest_of_thread().found; }

  const float* scores_;
  const int64_t size_;
  const Wanted& wanted_;
  const double fraction_;
};

struct Uniform { const uint64_t* seeds; const uint64_t* indices; double* fractions; int64_t count; };

}  // namespace

extern "C" int64_t selective_draw(const Call* call) {
  // Waking a team costs some microseconds, as in ragged_attention_cpu.cpp.
  const int64_t threads = call->rows * call->vocabulary < 100'000 ? 1 : call->threads;
  parallel_for(*call, call->rows, threads, [&](int64_t row) { call->ids[row] = Row(*call, row).draw(); });
  return 0;
}

extern "C" int64_t selective_uniform(const Uniform* call) {
  for (int64_t i = 0; i < call->count; ++i) call->fractions[i] = uniform(call->seeds[i], call->indices[i]);
  return 0;
}
