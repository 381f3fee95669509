// The place of the largest score of each row: what greedy decoding chooses.
//
// A row is read once, CHUNK scores at a time, for the first chunk with the largest score; only that is read again. A score
// that is not a number counts as the largest, and of equal ones the first, as `torch.argmax` has it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "scores_cpu.h"
#include "threads_cpu.h"

namespace {

constexpr int64_t W = 16, CHUNK = 64 * W;
typedef float Vector __attribute__((vector_size(W * 4)));
typedef uint32_t Bits __attribute__((vector_size(W * 4)));
typedef int32_t Mask __attribute__((vector_size(W * 4)));
typedef uint16_t Halves __attribute__((vector_size(W * 2)));

struct Call {
  const void* scores;  // [S, V], rows `stride` scores apart
  int64_t* ids;        // [S]
  int64_t rows, vocabulary, stride, dtype;  // 0: float32, 1: bfloat16
  int64_t threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

inline Vector load(const float* from) {
  Vector found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

// A bfloat16 is the upper half of a float32.
inline Vector load(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Bits bits = __builtin_convertvector(halves, Bits) << 16;
  Vector found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

// The largest score of a chunk; not a number, if one of them is none.
template <typename Score>
float largest_of(const Score* scores, int64_t size) {
  float most = -std::numeric_limits<float>::infinity();
  bool strange = false;
  int64_t at = 0;
  if (size >= W) {
    Vector lanes = load(scores);
    Mask odd = lanes != lanes;
    for (at = W; at + W <= size; at += W) {
      const Vector next = load(scores + at);
      odd |= next != next;
      lanes = next > lanes ? next : lanes;
    }
    for (int64_t l = 0; l < W; ++l) {
      strange |= odd[l] != 0;
      most = std::max(most, lanes[l]);
    }
  }
  for (; at < size; ++at) {
    const float score = value(scores[at]);
    strange |= score != score;
    most = std::max(most, score);
  }
  return strange ? std::numeric_limits<float>::quiet_NaN() : most;
}

template <typename Score>
int64_t place_of_largest(const Score* scores, int64_t size) {
  float most = -std::numeric_limits<float>::infinity();
  int64_t chunk = 0;
  for (int64_t first = 0; first < size && most == most; first += CHUNK) {
    const float found = largest_of(scores + first, std::min(CHUNK, size - first));
    if (!(found <= most)) most = found, chunk = first;
  }
  for (int64_t at = chunk; at < size; ++at) {
    const float score = value(scores[at]);
    if (score == most || (score != score && most != most)) return at;
  }
  return 0;
}

}  // namespace

extern "C" int64_t selective_largest(const Call* call) {
  // Waking a team costs some microseconds, as in ragged_attention_cpu.cpp.
  const int64_t threads = call->rows * call->vocabulary < 100'000 ? 1 : call->threads;
  parallel_for(*call, call->rows, threads, [&](int64_t row) {
    const int64_t start = row * call->stride;
    call->ids[row] = call->dtype == 0
        ? place_of_largest(static_cast<const float*>(call->scores) + start, call->vocabulary)
        : place_of_largest(static_cast<const uint16_t*>(call->scores) + start, call->vocabulary);
  });
  return 0;
}
