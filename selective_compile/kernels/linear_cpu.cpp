// y = x @ weight.T + bias on a CPU for one weight or several, each read where it lies: [N, K] row-major, no packed copy
// kept.
//
// Two kernels, both accumulating in float32:
//
//   dot        lanes run along K. A tile of weight rows is streamed once against up to eight rows of x; the tile's
//              accumulators are summed across their lanes together at the end.
//   broadcast  lanes run along the rows of x, which are first transposed into panels [K][W] (a cost of M * K, paid once
//              for all weights). One word of a weight at a time is broadcast straight from its row, so weights need no
//              packing and the accumulators no sum across lanes.
//
// An output is summed in one order, whatever the other rows, columns, weights and threads: a row's result changes with
// M only where M changes the kernel.

#include "linear_broadcast_cpu.h"
#include "linear_dot_cpu.h"

namespace {

template <class T, class Weight>
void linear(const Call& p) {
    constexpr int MOST = std::min(W, MAX_DOT_ROWS);
    const bool sure = Weight::size != T::size || p.m <= SURE_DOT_ROWS || p.m * p.k * T::size <= MAX_DOT_BYTES;
    if (p.m <= MOST && sure)
        return dot<T, Weight>(p, std::make_integer_sequence<int, MOST>());
    const int64_t passes = (p.m + MAX_X_ROWS - 1) / MAX_X_ROWS, rows = ((p.m + passes - 1) / passes + W - 1) / W * W;
    for (int64_t row = 0; row < p.m; row += MAX_PASSES * rows)
        broadcast_rows<T, Weight>(p, row, std::min(p.m, row + MAX_PASSES * rows), rows);
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
