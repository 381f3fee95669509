// Makes the calls of a compiled step in order: what the code around them computes of sizes and addresses are sums.

#include <cstdint>
#include <utility>

namespace {

constexpr int64_t MOST = 64;  // arguments of a call

// A call in `code`: its function, whether this takes the address of its arguments, whether it then returns a status,
// and their number; then each argument: the base that it lies at (base 0 is 0), the bytes or the number to add, how
// many products to add to that, and of each of them symbol and factor.
struct CallSequence {
  const int64_t* code;
  int64_t calls;
  const int64_t* bases;
  const int64_t* symbols;
};

template <int64_t> using Argument = int64_t;

template <int64_t... I> void call_with(int64_t function, const int64_t* values, std::integer_sequence<int64_t, I...>) {
  reinterpret_cast<void (*)(Argument<I>...)>(function)(values[I]...);
}

template <int64_t N> void call(int64_t function, const int64_t* values) {
  call_with(function, values, std::make_integer_sequence<int64_t, N>());
}

// Pointers and 64-bit integers are passed alike.
template <int64_t... N>
void spread(int64_t function, const int64_t* values, int64_t count, std::integer_sequence<int64_t, N...>) {
  using Spread = void (*)(int64_t, const int64_t*);
  static constexpr Spread BY_COUNT[] = {&call<N>...};
  BY_COUNT[count](function, values);
}

int64_t make_calls(const CallSequence& sequence) {
  int64_t values[MOST];
  const int64_t* at = sequence.code;
  for (int64_t i = 0; i < sequence.calls; ++i) {
    const int64_t function = at[0], packed = at[1], checked = at[2], count = at[3];
    at += 4;
    for (int64_t a = 0; a < count; ++a) {
      int64_t value = sequence.bases[at[0]] + at[1], products = at[2];
      for (at += 3; products; --products, at += 2) value += sequence.symbols[at[0]] * at[1];
      values[a] = value;
    }
    if (!packed) spread(function, values, count, std::make_integer_sequence<int64_t, MOST + 1>());
    else if (!checked) reinterpret_cast<void (*)(const int64_t*)>(function)(values);
    else if (int status = reinterpret_cast<int (*)(const int64_t*)>(function)(values)) return status;
  }
  return 0;
}

}  // namespace

// Not 0: the status of the call that failed; -1: generated code has thrown, as it does for an index out of bounds.
extern "C" int64_t selective_calls(const CallSequence* given) {
  try {
    return make_calls(*given);
  } catch (...) {
    return -1;
  }
}
