// The two rates that no program on these cores can exceed: reading memory, and multiplying what is in registers already;
// and the rate of reading memory that lies in blocks, in the order of a list.
//
// Vectors are GCC vector extensions, as in kernels/linear_cpu.cpp; the team of threads is torch's own OpenMP runtime.

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int CHAINS = 12;  // independent sums: latency times issue rate of today's cores is 8 to 10
typedef float Floats __attribute__((vector_size(W * 4)));
typedef uint32_t Words __attribute__((vector_size(W * 4)));

struct Float32 {
    static constexpr int64_t pairs = 1;  // products in a 32-bit lane
    static Floats step(Floats sum, Words a, Words b) { return sum + (Floats)a * (Floats)b; }
};

struct BFloat16 {
#if defined(__AVX512BF16__)
    static constexpr int64_t pairs = 2;
    static Floats step(Floats sum, Words a, Words b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
#else
    static constexpr int64_t pairs = 1;  // widened to float32, which costs nothing here
    static Floats step(Floats sum, Words a, Words b) { return Float32::step(sum, a, b); }
#endif
};

struct Call {
    int64_t kind, address, size, threads;
};

void keep(Floats value) { asm volatile("" : : "m"(value) : "memory"); }

template <class Type>
void multiply(const Call& call) {
    Floats sums[CHAINS] = {};
    Words a = {}, b = {};
    asm volatile("" : "+m"(a), "+m"(b));  // unknown to the compiler
    for (int64_t i = 0; i < call.size; ++i) {
#pragma GCC unroll 16
        for (int chain = 0; chain < CHAINS; ++chain) sums[chain] = Type::step(sums[chain], a, b);
    }
    for (Floats sum : sums) keep(sum);
}

void read(const Call& call, int64_t thread) {
    constexpr int64_t STRIDE = 4 * sizeof(Words);
    const int64_t share = call.size / call.threads / STRIDE * STRIDE;
    const char* at = reinterpret_cast<const char*>(call.address) + thread * share;
    Words sums[4] = {};
    // Fetched into the second level of the cache, where more lines are awaited at a time than in the first: 1.3 times as
    // fast on a Zen 4, and 1.02 times as fast as torch's sum.
    for (const char* end = at + share; at < end; at += STRIDE) {
        __builtin_prefetch(at + 16384, 0, 2);
        for (int i = 0; i < 4; ++i) {
            Words value;
            std::memcpy(&value, at + i * sizeof value, sizeof value);
            sums[i] ^= value;
        }
    }
    for (Words sum : sums) keep((Floats)sum);
}

struct Blocks {
    const char* address;
    const int32_t* order;
    int64_t count, size, threads;  // size: of a block, in bytes
};

// The next block is fetched into the second level of the cache meanwhile, line by line.
void read(const Blocks& blocks, int64_t thread) {
    const int64_t begin = blocks.count * thread / blocks.threads, end = blocks.count * (thread + 1) / blocks.threads;
    Words sum = {};
    for (int64_t i = begin; i < end; ++i) {
        const char* at = blocks.address + blocks.order[i] * blocks.size;
        const char* next = blocks.address + blocks.order[i + 1 < end ? i + 1 : i] * blocks.size;
        for (int64_t offset = 0; offset < blocks.size; offset += sizeof(Words)) {
            Words value;
            std::memcpy(&value, at + offset, sizeof value);
            __builtin_prefetch(next + offset, 0, 2);
            sum ^= value;
        }
    }
    keep((Floats)sum);
}

void run(const Blocks& blocks, int64_t thread) { read(blocks, thread); }

template <class Call>
struct Team {
    const Call* call;
    int64_t next;
};

void run(const Call& call, int64_t thread) {
    if (call.kind == 0) return read(call, thread);
    call.kind == 1 ? multiply<Float32>(call) : multiply<BFloat16>(call);
}

template <class Call>
void work(void* data) {
    Team<Call>& team = *static_cast<Team<Call>*>(data);
    const int64_t thread = __atomic_fetch_add(&team.next, 1, __ATOMIC_RELAXED);
    if (thread < team.call->threads) run(*team.call, thread);
}

template <class Call>
void on_all_threads(const Call& call, int64_t parallel) {
    Team<Call> team = {&call, 0};
    using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
    if (parallel) reinterpret_cast<Parallel>(parallel)(work<Call>, &team, unsigned(call.threads), 0);
    else work<Call>(&team);
}

}  // namespace

// Reads `size` bytes (kind 0), or runs `size` rounds of multiplications in float32 (1) or bfloat16 (2) on each thread.
// Returns how many bytes were read, or how many multiplications and additions were done, by all threads.
extern "C" int64_t selective_ceiling(int64_t kind, int64_t address, int64_t size, int64_t threads, int64_t parallel) {
    const Call call = {kind, address, size, parallel ? threads : 1};
    on_all_threads(call, parallel);
    if (kind == 0) return size / call.threads / (4 * sizeof(Words)) * (4 * sizeof(Words)) * call.threads;
    return 2 * size * CHAINS * W * (kind == 1 ? Float32::pairs : BFloat16::pairs) * call.threads;
}

// Reads blocks of `size` bytes, a multiple of 64, at `address`: those that `order`, `count` int32, lists, shared out.
extern "C" void selective_read_blocks(int64_t address, int64_t order, int64_t count, int64_t size, int64_t threads,
                                      int64_t parallel) {
    const Blocks blocks = {reinterpret_cast<const char*>(address), reinterpret_cast<const int32_t*>(order), count, size,
                           parallel ? threads : 1};
    on_all_threads(blocks, parallel);
}
