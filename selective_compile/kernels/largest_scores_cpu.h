// The largest scores of a row.
//
// A row is read once for the maxima of its groups, W lanes of up to DEPTH scores that are W apart. Each of the k
// largest maxima is a score of its own, so that no score below the k-th of them is among the k largest scores: only the
// groups that reach up to it are read again.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Candidate { double weight; float score; int32_t id; };

class LargestScores {
 public:
  // The `count` largest, at most `size` of them, in any order, and whatever else was met. False: a score is no number.
  bool find(const float* scores, int64_t size, int64_t count) {
    scores_ = scores, size_ = size, whole_ = size / W * W;
    if (!find_maxima()) return false;
    collect(bound(count));
    return true;
  }

  // All that are at least `limit` once divided.
  void find_scaled(float limit, float temperature) {
    found.clear();
    for (int64_t id = 0; id < size_; ++id)
      if (scores_[id] / temperature >= limit) found.push_back({0, scores_[id], int32_t(id)});
  }

  std::vector<Candidate> found;

 private:
  static constexpr int64_t W = 16, DEPTH = 64, BLOCK = W * DEPTH;
  typedef float Vector __attribute__((vector_size(W * 4)));
  typedef int32_t Mask __attribute__((vector_size(W * 4)));

  static Vector load(const float* from) {
    Vector found;
    std::memcpy(&found, from, sizeof found);
    return found;
  }

  bool find_maxima() {
    maxima_.clear();
    Mask strange{};
    for (int64_t first = 0; first < whole_; first += BLOCK) {
      Vector most = load(scores_ + first);
      strange |= most != most;
      for (int64_t at = first + W; at < std::min(first + BLOCK, whole_); at += W) {
        const Vector score = load(scores_ + at);
        strange |= score != score;
        most = score > most ? score : most;
      }
      maxima_.resize(maxima_.size() + W);
      std::memcpy(maxima_.data() + maxima_.size() - W, &most, sizeof most);
    }
    bool sound = true;
    for (int64_t l = 0; l < W; ++l) sound &= !strange[l];
    for (int64_t i = whole_; i < size_; ++i) sound &= scores_[i] == scores_[i];
    return sound;
  }

  // At least `count` scores are not below it.
  float bound(int64_t count) {
    tops_ = maxima_;
    tops_.insert(tops_.end(), scores_ + whole_, scores_ + size_);
    if (int64_t(tops_.size()) < count) return NEVER;
    std::nth_element(tops_.begin(), tops_.begin() + (count - 1), tops_.end(), std::greater<float>());
    return tops_[count - 1];
  }

  void collect(float bound) {
    found.clear();
    int64_t held = 0;
    auto take = [&](int64_t id) {  // without a branch that is hard to foresee
      found[held] = {0, scores_[id], int32_t(id)};
      held += scores_[id] >= bound;
    };
    for (int64_t group = 0; group < int64_t(maxima_.size()); ++group) {
      if (!(maxima_[group] >= bound)) continue;
      const int64_t first = group / W * BLOCK + group % W;
      found.resize(held + DEPTH + 1);
      for (int64_t at = first; at < std::min(first + BLOCK, whole_); at += W) take(at);
    }
    found.resize(held + W);
    for (int64_t at = whole_; at < size_; ++at) take(at);
    found.resize(held);
  }

  const float* scores_ = nullptr;
  int64_t size_ = 0, whole_ = 0;
  std::vector<float> maxima_, tops_;
};

}  // namespace
