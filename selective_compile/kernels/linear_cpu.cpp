// y = x @ weight.T + bias on a CPU for one weight or several, each read where it lies: [N, K] row-major, no packed copy
// kept.
//
// Three kernels, all accumulating in float32:
//
//   dot        lanes run along K. A tile of weight rows is streamed once, against a few rows of x at a time; the tile's
//              accumulators are summed across their lanes together at the end.
//   broadcast  lanes run along the rows of x, which are first transposed into panels [K][W] (a cost of M * K, paid once
//              for all weights). One word of a weight at a time is broadcast straight from its row, so weights need no
//              packing and the accumulators no sum across lanes. Words of K are summed in chains, and these then, since
//              long chains are far from the exact sum.
//   matrix     of bfloat16, where the processor has matrix units: tiles of the weight as they lie there against the same
//              panels.
//
// An output is summed in one order, whatever the other rows, columns, weights and threads: a row's result changes with
// M only where M changes the kernel.

#include "linear_broadcast_cpu.h"
#include "linear_dot_cpu.h"
#include "linear_matrix_cpu.h"

namespace {

// `broadcast` took 1.0 to 1.4 times as long up to these, and less beyond (two threads of a Zen 4, K of 768 to 14336; with
// W of 8, the same compiled for AVX2).
template <class T, class Weight>
constexpr int MAX_DOT_ROWS = T::size == 2 && Weight::size == 2 ? (W == 16 ? 18 : 16) : (W == 16 ? 12 : 8);

// From so many rows on, up to ten, `dot` took 1.03 to 1.5 times as long, 2.1 times of int8, and less with fewer (two threads
// of a Xeon).
template <class Weight>
constexpr int MIN_MATRIX_ROWS = Weight::size == 1 ? 5 : 4;

template <class T, class Weight>
void linear(const Call& p) {
#if MATRIX_UNIT
    if constexpr (T::size == 2)
        if (p.matrix_unit && p.m >= MIN_MATRIX_ROWS<Weight> && has_matrix_unit()) return packed<Matrix<Weight>>(p);
#endif
    if (p.m <= MAX_DOT_ROWS<T, Weight>)
        return dot<T, Weight>(p, std::make_integer_sequence<int, MAX_PASS_ROWS<T, Weight>>());
    packed<Broadcast<T, Weight>>(p);
}

template <class T>
void linear(const Call& p) {
    p.begin()->scales ? linear<T, Int8<T>>(p) : linear<T, Same<T>>(p);
}

}  // namespace

// x, weights, biases and ys are contiguous and of one dtype; or all weights are int8, with scales.
extern "C" void selective_linear(const Call* call) {
    call->is_bfloat16 ? linear<BFloat16>(*call) : linear<Float32>(*call);
}
