// Rows in the order of their groups, as those of experts that tokens choose: a counting sort; and rows in any order.
//
// The sort takes a few microseconds for what a library sorts, counts and sums in five calls, and no thread but the
// caller's: 512 tokens with 8 experts each are 4,096 rows.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "threads_cpu.h"

namespace {

enum Status { OK = 0, BAD_GROUP = 7, BAD_INDEX = 8 };  // as statuses.py has them

struct Call {
  const int64_t* choice;  // [tokens, each]
  const int32_t* cu_seqlens_q;  // [requests + 1], of which the last says how many tokens are somebody's; null: all
  int64_t *order, *places;
  int32_t* ends;
  int64_t tokens, each, groups, requests;
};

struct TakeCall {
  const char* x;         // [rows, row_bytes]
  const int64_t* index;  // [taken]
  char* y;               // [taken, row_bytes]
  int64_t rows, row_bytes, taken;
  int64_t threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

constexpr int64_t SHARE = 64;  // rows that a thread takes at a time

// Those of nobody's tokens are the last one's in front of them.
inline const int64_t* choices_of(const Call& p, int64_t token, int64_t used) {
  return p.choice + std::min(token, used - 1) * p.each;
}

}  // namespace

extern "C" int64_t selective_group_rows(const Call* given) {
  const Call& p = *given;
  const int64_t last = p.cu_seqlens_q ? p.cu_seqlens_q[p.requests] : 0;
  const int64_t used = last > 0 ? std::min(last, p.tokens) : p.tokens;
  std::vector<int64_t> next(p.groups + 2);  // of each group, and of what is in none; first how many there are in it
  for (int64_t token = 0; token < p.tokens; ++token)
    for (int64_t i = 0; i < p.each; ++i) {
      const int64_t group = choices_of(p, token, used)[i];
      if (group < 0) return BAD_GROUP;
      ++next[std::min(group, p.groups) + 1];
    }
  for (int64_t group = 0; group < p.groups; ++group) {
    next[group + 1] += next[group];
    p.ends[group] = int32_t(next[group + 1]);
  }
  for (int64_t token = 0, row = 0; token < p.tokens; ++token)
    for (int64_t i = 0; i < p.each; ++i, ++row) {
      const int64_t place = next[std::min(choices_of(p, token, used)[i], p.groups)]++;
      p.order[place] = row;
      p.places[row] = place;
    }
  return OK;
}

extern "C" int64_t selective_take_rows(const TakeCall* given) {
  const TakeCall& p = *given;
  for (int64_t i = 0; i < p.taken; ++i)
    if (p.index[i] < 0 || p.index[i] >= p.rows) return BAD_INDEX;
  // Waking a team costs some microseconds, as in ragged_attention_cpu.cpp.
  const int64_t threads = p.taken * p.row_bytes < 400'000 ? 1 : p.threads;
  parallel_for(p, (p.taken + SHARE - 1) / SHARE, threads, [&](int64_t share) {
    const int64_t end = std::min(p.taken, (share + 1) * SHARE);
    for (int64_t i = share * SHARE; i < end; ++i)
      std::memcpy(p.y + i * p.row_bytes, p.x + p.index[i] * p.row_bytes, p.row_bytes);
  });
  return OK;
}
