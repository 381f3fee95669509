// What is changed in rows of scores before a token is chosen: penalties and bans of single tokens, and the tokens that
// a grammar forbids.

#include <atomic>
#include <cstdint>
#include <limits>

#include "threads_cpu.h"
#include "vectors_cpu.h"

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Tokens {
  int64_t row;
  const int64_t* ids;
  int64_t count;
  double penalty;  // of repetition; not read of what cannot come at all
};

struct Call {
  float* scores;         // [S, V], rows `stride` apart
  const Tokens* tokens;  // penalties before bans, at most one of a row
  int64_t penalties, count, vocabulary, stride;
  int64_t threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

struct Grammars {
  float* scores;         // [S, V], rows `stride` apart
  const int64_t* rows;   // [R], of the scores
  const uint32_t* bits;  // [R, words]: which tokens may come
  int64_t count, words, vocabulary, stride;
  int64_t threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

bool known(const Call& call, const Tokens& tokens) {
  bool found = true;
  for (int64_t i = 0; i < tokens.count; ++i) found &= uint64_t(tokens.ids[i]) < uint64_t(call.vocabulary);
  return found;
}

// As `RepetitionPenaltyLogitsProcessor`: every score is read before any is written, since tokens repeat.
void penalise(const Call& call, const Tokens& tokens) {
  float* row = call.scores + tokens.row * call.stride;
  float* kept = scratch_of_thread.floats(tokens.count);
  const float penalty = float(tokens.penalty);
  for (int64_t i = 0; i < tokens.count; ++i) {
    const float score = row[tokens.ids[i]];
    kept[i] = score < 0 ? score * penalty : score / penalty;
  }
  for (int64_t i = 0; i < tokens.count; ++i) row[tokens.ids[i]] = kept[i];
}

void forbid(float* row, const uint32_t* bits, int64_t vocabulary) {
  vi place;
  for (int l = 0; l < W; ++l) place[l] = l;
  for (int64_t first = 0; first < vocabulary; first += 32) {
    const uint32_t word = bits[first / 32];
    if (word == 0xffffffffu) continue;
    const int64_t size = std::min<int64_t>(32, vocabulary - first);
    int64_t at = 0;
    for (; at + W <= size; at += W) {
      const vi allowed = (vi)(((vu{} + (word >> at)) >> (vu)place & 1) != 0);
      store(row + first + at, select(allowed, load(row + first + at), splat(NEVER)));
    }
    for (; at < size; ++at)
      if (!(word >> at & 1)) row[first + at] = NEVER;
  }
}

}  // namespace

// Not 0: a token is not of the vocabulary, and nothing was changed.
extern "C" int64_t selective_penalise(const Call* call) {
  int64_t changed = 0;
  for (int64_t i = 0; i < call->count; ++i) {
    if (!known(*call, call->tokens[i])) return 1;
    changed += call->tokens[i].count;
  }
  // Waking a team costs some microseconds, as in ragged_attention_cpu.cpp.
  const int64_t threads = changed < 20'000 ? 1 : call->threads;
  parallel_for(*call, call->penalties, threads, [&](int64_t i) { penalise(*call, call->tokens[i]); });
  for (int64_t i = call->penalties; i < call->count; ++i) {
    const Tokens& banned = call->tokens[i];
    float* row = call->scores + banned.row * call->stride;
    for (int64_t t = 0; t < banned.count; ++t) row[banned.ids[t]] = NEVER;
  }
  return 0;
}

extern "C" int64_t selective_forbid(const Grammars* call) {
  const int64_t threads = call->count * call->vocabulary < 100'000 ? 1 : call->threads;
  parallel_for(*call, call->count, threads, [&](int64_t i) {
    forbid(call->scores + call->rows[i] * call->stride, call->bits + i * call->words, call->vocabulary);
  });
  return 0;
}
