// A call of the linear kernel, and how its work is shared among threads.
//
// The team of threads is torch's own OpenMP runtime, called through the pointer that Python passes. Every thread has
// its own share of the weights' rows, which it reads front to back, and then helps with the others': a thread that the
// system takes off its core holds nobody up for long.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t LINE = 64;
constexpr int64_t MAX_SHARE_TILES = 8;  // of a thread's share at a time; also bounds the results held before a store
constexpr int64_t SHARES = 4;           // that many or more for each thread, where N allows

// What Python packs, 8 bytes a field: a call, and behind it its parts.
struct Part {
    const char* weight;   // [n, k], or [k, n] where they lie by columns
    const char* bias;     // [n] or null
    char* y;              // [m, n]
    int64_t n;            // at least 1
    const float* scales;  // [n], of the rows of an int8 weight; null for weights of x's dtype, in all parts alike
};

struct Call {
    const char* x;  // [m, k]
    int64_t m, k;   // at least 1
    int64_t is_bfloat16;
    int64_t matrix_unit;  // whether one may be used, where there is one
    int64_t by_columns;   // how all weights lie, which are not int8 then
    int64_t threads;
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel, or null: one thread
    int64_t count;                                                 // of parts

    const Part* begin() const { return reinterpret_cast<const Part*>(this + 1); }
    const Part* end() const { return begin() + count; }
};

// Rows of x in groups, each against a weight of its own.
struct GroupedCall {
    const char* x;        // [rows, k]
    const char* weights;  // [groups, n, k]
    const float* scales;  // [groups, n] of int8 weights, else null
    const void* ends;     // [groups]: where each group's rows end
    char* y;              // [rows, n]
    int64_t rows, groups, n, k;
    int64_t is_bfloat16, matrix_unit;  // as in a `Call`
    int64_t batch_invariant;           // whether groups of few rows are multiplied as those of more are
    int64_t short_ends;                // int32, not int64
    int64_t by_columns;                // the weights are [groups, k, n], and not int8
    int64_t threads;
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);

    int64_t end(int64_t group) const {
        return short_ends ? static_cast<const int32_t*>(ends)[group] : static_cast<const int64_t*>(ends)[group];
    }
};

// The rows of all weights in tiles of `size`, numbered through the parts; a part's last tile may be cut short.
class Tiles {
    const Call* call;
    int64_t size;

    int64_t of(const Part& part) const { return (part.n + size - 1) / size; }

public:
    Tiles(const Call& call, int64_t size) : call(&call), size(size) {}

    int64_t count() const {
        int64_t count = 0;
        for (const Part& part : *call) count += of(part);
        return count;
    }

    // work(part, begin, end, last) for the tiles [begin, end) of a part that are among [begin, end) of all; `last` is
    // where those of the part end that are among all up to `last`.
    template <class Work>
    void take(int64_t begin, int64_t end, int64_t last, Work&& work) const {
        for (const Part& part : *call) {
            const int64_t count = of(part);
            if (begin < count && end > 0)
                work(part, std::max<int64_t>(begin, 0), std::min(end, count), std::min(last, count));
            begin -= count, end -= count, last -= count;
        }
    }
};

// `items` of work, split evenly over `parts` threads; one that has finished its own part takes from the next one's.
class Shares {
    struct alignas(LINE) Counter { std::atomic<int64_t> taken{0}; };
    std::vector<Counter> counters;
    int64_t items;

public:
    Shares(int64_t items, int64_t parts) : counters(parts), items(items) {}

    // work(item, end), where `end` is the end of the part that the item belongs to.
    template <class Work>
    void take(int64_t part, Work&& work) {
        const int64_t parts = counters.size();
        for (int64_t i = 0; i < parts; ++i) {
            const int64_t from = (part + i) % parts, begin = items * from / parts, end = items * (from + 1) / parts;
            for (;;) {
                const int64_t item = begin + counters[from].taken.fetch_add(1, std::memory_order_relaxed);
                if (item >= end) break;
                work(item, end);
            }
        }
    }
};

template <class Body>
void run_team(const Call& p, int64_t threads, Body&& body) {
    if (threads == 1) return body(0);
    struct Job {
        Body& body;
        std::atomic<int64_t> started{0};
    } job{body};
    const auto enter = [](void* data) {
        Job& job = *static_cast<Job*>(data);
        job.body(job.started++);
    };
    p.parallel(enter, &job, unsigned(threads), 0);
}

// Tiles as items of work, `share` of them each, which a thread takes at a time.
struct Split {
    int64_t share, items;
    Split(const Call& p, int64_t tiles)
        : share(std::clamp<int64_t>(tiles / (p.threads * SHARES), 1, MAX_SHARE_TILES)), items((tiles + share - 1) / share) {}
};

}  // namespace
