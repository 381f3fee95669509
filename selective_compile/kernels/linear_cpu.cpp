// y = x @ weight.T + bias on a CPU for one weight or several, each read where it lies, [N, K] or [K, N] row-major: no
// packed copy is kept.
//
// Kernels for weights by rows, all accumulating in float32:
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
// And for those by columns, which one is `Direct` and the other `ByUnits`, whose lanes run along the columns.
//
// An output is summed in one order, whatever the other rows, columns, weights and threads: a row's result changes with
// M only where M changes the kernel.
//
// Rows in groups, as those of experts, are so many calls that one team makes.

#include "linear_broadcast_cpu.h"
#include "linear_columns_matrix_cpu.h"
#include "linear_dot_cpu.h"
#include "linear_matrix_cpu.h"

namespace {

using Calls = std::vector<const Call*>;  // at least one, of the same words of x and of weights

// `broadcast` took 1.0 to 1.4 times as long up to these, and less beyond (two threads of a Zen 4, K of 768 to 14336; with
// W of 8, the same compiled for AVX2).
template <class T, class Weight>
constexpr int MAX_DOT_ROWS = T::size == 2 && Weight::size == 2 ? (W == 16 ? 18 : 16) : (W == 16 ? 12 : 8);

// From so many rows on, up to ten, `dot` took 1.03 to 1.5 times as long, 2.1 times of int8, and less with fewer (two threads
// of a Xeon).
template <class Weight>
constexpr int MIN_MATRIX_ROWS = Weight::size == 1 ? 5 : 4;

// Of weights by columns: with five to eight rows 0.8 to 1.2 times as long as `Direct` took with four (two threads of a Xeon).
constexpr int MIN_UNIT_ROWS = 5;

template <class Work>
int64_t items_of(const Calls& calls) {
    int64_t items = 0;
    for (const Call* call : calls) items += Work::items(*call);
    return items;
}

template <class Work>
std::vector<Work> for_team(const Calls& calls, int64_t threads) {
    std::vector<Work> works;
    for (const Call* call : calls) works.emplace_back(*call, threads);
    return works;
}

// Calls with threads of one team: of those with few rows and those with more, which are multiplied in the `Way`.
template <class Way>
void multiply(const Calls& few, const Calls& many) {
    using OfFew = Dots<typename Way::T, typename Way::Weight>;
    std::vector<PassRows> passes;
    for (const Call* call : many) add_passes<Way>(*call, passes);
    const PassRows *next = passes.data(), *const end = next + passes.size();
    for (bool first = true; first || next < end; first = false) {
        const PassRows* const begin = next;
        const Call& any = *(few.empty() ? many : few)[0];
        int64_t items = first ? items_of<OfFew>(few) : 0, rows = 0;  // of packed x
        for (; next < end && rows + Passes<Way>::packed_rows(*next) <= Way::PASSES * Way::X_ROWS; ++next)
            items += Passes<Way>::items(*next), rows += Passes<Way>::packed_rows(*next);
        const int64_t threads = any.parallel ? std::min(any.threads, items) : 1;
        std::vector<OfFew> dots = for_team<OfFew>(first ? few : Calls(), threads);
        Passes<Way> packed(begin, next, threads);
        run_team(any, threads, [&](int64_t thread) {
            packed.pack(thread);
            for (OfFew& call : dots) call.take(thread);
            packed.multiply(thread);
        });
    }
}

struct FewAndMany {
    Calls few, many;

    FewAndMany(const Calls& calls, int64_t most_few, bool one_order) {
        for (const Call* call : calls) (call->m <= most_few && !one_order ? few : many).push_back(call);
    }
};

template <class Way>
void multiply(const Calls& calls, int64_t most_few, bool one_order) {
    const FewAndMany all(calls, most_few, one_order);
    multiply<Way>(all.few, all.many);
}

template <class FewWay, class ManyWay>
void multiply_columns(const FewAndMany& all, const Call& any) {
    using OfFew = ColumnsCall<FewWay>;
    using OfMany = ColumnsCall<ManyWay>;
    const int64_t items = items_of<OfFew>(all.few) + items_of<OfMany>(all.many);
    const int64_t threads = any.parallel ? std::min(any.threads, items) : 1;
    std::vector<OfFew> few = for_team<OfFew>(all.few, threads);
    std::vector<OfMany> many = for_team<OfMany>(all.many, threads);
    run_team(any, threads, [&](int64_t thread) {
        for (OfFew& call : few) call.take(thread);
        for (OfMany& call : many) call.take(thread);
    });
}

template <class T>
void linear_by_columns(const Calls& calls, bool one_order) {
#if MATRIX_UNIT
    if constexpr (T::size == 2)
        if (calls[0]->matrix_unit && has_matrix_unit())
            return multiply_columns<Direct<T>, ByUnits>({calls, MIN_UNIT_ROWS - 1, one_order}, *calls[0]);
#endif
    multiply_columns<Direct<T>, Direct<T>>({calls, 0, one_order}, *calls[0]);
}

template <class T, class Weight>
void linear(const Calls& calls, bool one_order) {
#if MATRIX_UNIT
    if constexpr (T::size == 2)
        if (calls[0]->matrix_unit && has_matrix_unit())
            return multiply<Matrix<Weight>>(calls, MIN_MATRIX_ROWS<Weight> - 1, one_order);
#endif
    multiply<Broadcast<T, Weight>>(calls, MAX_DOT_ROWS<T, Weight>, one_order);
}

template <class T>
void linear_of(const Calls& calls, bool one_order) {
    if (calls[0]->by_columns) return linear_by_columns<T>(calls, one_order);
    calls[0]->begin()->scales ? linear<T, Int8<T>>(calls, one_order) : linear<T, Same<T>>(calls, one_order);
}

// With `one_order`, calls with few rows sum as those with more do.
void linear(const Calls& calls, bool one_order) {
    calls[0]->is_bfloat16 ? linear_of<BFloat16>(calls, one_order) : linear_of<Float32>(calls, one_order);
}

constexpr int64_t BAD_ENDS = 6;  // as statuses.py has it

// A call of the rows [begin, end) of a group.
struct OfGroup {
    Call call;
    Part part;

    OfGroup(const GroupedCall& p, int64_t group, int64_t begin, int64_t end) {
        const int64_t size = p.is_bfloat16 ? 2 : 4, weight_size = p.scales ? 1 : size;
        call = {p.x + begin * p.k * size, end - begin, p.k, p.is_bfloat16, p.matrix_unit, p.by_columns, p.threads, p.parallel, 1};
        const char* weight = p.weights + group * p.n * p.k * weight_size;
        part = {weight, nullptr, p.y + begin * p.n * size, p.n, p.scales ? p.scales + group * p.n : nullptr};
    }
};
static_assert(sizeof(OfGroup) == sizeof(Call) + sizeof(Part));

}  // namespace

// x, weights, biases and ys are contiguous and of one dtype, all weights by rows or all by columns; or all weights are int8,
// with scales.
extern "C" void selective_linear(const Call* call) { linear({call}, false); }

// x, weights and y likewise; rows behind the last group become 0. Returns BAD_ENDS if the ends are not in order or not
// among the rows, and has written nothing then.
extern "C" int64_t selective_grouped_linear(const GroupedCall* p) {
    int64_t end = 0;
    std::vector<OfGroup> groups;
    groups.reserve(p->groups);
    for (int64_t group = 0; group < p->groups; ++group) {
        const int64_t begin = end;
        end = p->end(group);
        if (end < begin || end > p->rows) return BAD_ENDS;
        if (end > begin) groups.emplace_back(*p, group, begin, end);
    }
    Calls calls;
    for (const OfGroup& group : groups) calls.push_back(&group.call);
    const int64_t row = p->n * (p->is_bfloat16 ? 2 : 4);
    const bool sums = !calls.empty() && p->n && p->k;
    if (sums) linear(calls, p->batch_invariant);
    const int64_t summed = sums ? end : 0;
    if (p->rows > summed && row) std::memset(p->y + summed * row, 0, (p->rows - summed) * row);
    return 0;
}
