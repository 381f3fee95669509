// Ragged attention for CPUs: write this step's keys and values into the pool, then attend per request.
//
// Legend
//   query vector  one (row, query head of a group); vector m of a request and key/value head is row m / G, head m % G.
//                 The G heads that share a key/value head are served by the same load of a key and of a value
//   item          the unit of work: up to TILE_VECTORS query vectors of one request and key/value head, over a run of keys
//   split         a query tile whose keys are divided among several items; the last of them to finish merges the partials
//   few, tile     the two kernels. few: under W query vectors, lanes run along the head, keys stream from memory (decode).
//                 tile: lanes run along the query vectors, keys and values are copied tile by tile (prefill)
//   PAIRS         lanes hold two bfloat16 instead of one float, and the multiply-add is the machine's bf16 dot product
//   W             floats in a SIMD vector;  Dp, Dvp: head sizes rounded up to W
//
// Scores are kept in base 2 (scale times log2 e), online softmax and sums in float32. How a request is cut into tiles and
// splits depends on that request alone, never on the batch or the number of threads: its result is the same in every batch.
// Threads take items from a shared counter, longest first; the team is torch's own OpenMP runtime, called through the
// pointer that Python passes: a second runtime would fight it for the cores.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// ------------------------------------------------------------------------------------------------ vectors

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int W = 16;
constexpr int PANEL = 4;  // vectors of lanes in a register tile of the tile kernel: 24 accumulators of 32 registers
#else
constexpr int W = 8;
constexpr int PANEL = 2;  // 12 accumulators of 16 registers
#endif
constexpr int ACCUMULATORS = W == 16 ? 24 : 12;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

template <typename V, typename S> inline V read(const S* from) { V v; std::memcpy(&v, from, sizeof v); return v; }
template <typename V, typename S> inline void write(S* to, V v) { std::memcpy(to, &v, sizeof v); }
inline vf splat(float x) { return vf{} + x; }
inline vi splat(int32_t x) { return vi{} + x; }
inline vf select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
inline vf larger(vf a, vf b) { return select(a > b, a, b); }

inline vf load(const float* p) { return read<vf>(p); }
inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(read<vh>(p), vu) << 16); }
inline void store(float* p, vf v) { write(p, v); }
inline void store(bf16* p, vf v) {
  vu bits = (vu)v;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vu kept = (vu)(v == v);
  write((uint16_t*)p, __builtin_convertvector((rounded & kept) | ((vu{} + 0x7fc0) & ~kept), vh));
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
inline vf load(const fp16* p) { return (vf)_mm512_cvtph_ps(read<__m256i>(p)); }
inline void store(fp16* p, vf v) { write(p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__F16C__) && defined(__AVX__)
inline vf load(const fp16* p) { return (vf)_mm256_cvtph_ps(read<__m128i>(p)); }
inline void store(fp16* p, vf v) { write(p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT)); }
#else
// Every binary16 number is exact in binary32 once its exponent is shifted by the factor 2^112 (subnormals included).
inline vf load(const fp16* p) {
  vu h = __builtin_convertvector(read<vh>(p), vu), magnitude = (h & 0x7fff) << 13;
  vf value = (vf)magnitude * 0x1p112f;
  vf special = (vf)(magnitude | 0x7f800000);
  return (vf)((vu)select((vi)((h & 0x7c00) == 0x7c00), special, value) | (h & 0x8000) << 16);
}
inline void store(fp16* p, vf v) {
  vu bits = (vu)v, sign = bits >> 16 & 0x8000;
  vf magnitude = (vf)(bits & 0x7fffffff);
  // Adding 1.5 * 2^23 units of the last binary16 place rounds to nearest even there; below 2^-14 that place is 2^-24.
  vu exponent = (vu)larger(magnitude, splat(0x1p-14f)) & 0x7f800000;
  vf shift = (vf)(exponent + (13u << 23)) * 1.5f;
  vf rounded = (magnitude + shift) - shift;
  vu half = (vu)(rounded * 0x1p-112f) >> 13;
  half = (vu)select(magnitude >= splat(65520.f), (vf)(vu{} + 0x7c00), (vf)half);
  half = (vu)select(magnitude == magnitude, (vf)half, (vf)(vu{} + 0x7e00));
  write((uint16_t*)p, __builtin_convertvector(half | sign, vh));
}
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
constexpr bool HAS_PAIRS = true;
inline vf pair_dot(vf sum, vf a, vf b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
inline vf make_pairs(vf low, vf high) {
  vu a = (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)low));
  vu b = (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)high));
  return (vf)(a | b << 16);
}
#else
constexpr bool HAS_PAIRS = false;
inline vf pair_dot(vf sum, vf, vf) { return sum; }
inline vf make_pairs(vf low, vf) { return low; }
#endif

// Holds a value in a register that is used several times: GCC would load it again as the operand of every multiply-add.
inline void pin(vf& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX__)
  asm("" : "+x"(v));
#endif
}

template <bool PAIRS> inline vf multiply_add(vf sum, vf a, vf b) {
  if constexpr (PAIRS) return pair_dot(sum, a, b);
  return sum + a * b;
}

// The sums of four vectors, in order.
inline void sum4(float* to, vf a, vf b, vf c, vf d) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX__)
  __m256 all = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  const vf vectors[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    to[i] = 0;
    for (int lane = 0; lane < W; ++lane) to[i] += vectors[i][lane];
  }
#endif
}

inline float largest(vf v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float x = v[0];
  for (int lane = 1; lane < W; ++lane) x = v[lane] > x ? v[lane] : x;
  return x;
#endif
}

inline vi lanes() {
  vi v{};
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

inline float total(vf v) {
  float sums[4];
  sum4(sums, v, v, v, v);
  return sums[0];
}

// 2^x for x <= 0, relative error 1e-7; 0 below 2^-125. Minimax polynomial on [-1/2, 1/2].
inline vf exp2(vf x) {
  vf shifted = x + 12582912.f;  // 1.5 * 2^23: the integer part lands in the low bits
  vf f = x - (shifted - 12582912.f);
  vf p = splat(1.53533606e-4f);
  p = p * f + 1.33988749e-3f;
  p = p * f + 9.61843737e-3f;
  p = p * f + 5.55033247e-2f;
  p = p * f + 2.40226479e-1f;
  p = p * f + 6.93147203e-1f;
  p = p * f + 1.f;
  vf power = (vf)(((vi)shifted + (127 - 0x4b400000)) << 23);
  return select(x < -125.f, vf{}, p * power);
}

inline float exp2(float x) { return exp2(splat(x))[0]; }

// tanh, relative error 2e-7: odd minimax polynomial below 5/8, by exp2 above.
inline vf tanh(vf x) {
  vf magnitude = (vf)((vi)x & 0x7fffffff), square = x * x;
  vf p = splat(-5.71704e-3f);
  p = p * square + 2.065058e-2f;
  p = p * square - 5.37435e-2f;
  p = p * square + 1.3331491e-1f;
  p = p * square - 3.3333284e-1f;
  vf near = magnitude + magnitude * square * p;
  vf e = exp2(magnitude * -2.885390082f);  // exp(-2 |x|)
  vf value = select(magnitude < 0.625f, near, (1.f - e) / (1.f + e));
  return (vf)((vi)value | ((vi)x & (int32_t)0x80000000));
}

// ------------------------------------------------------------------------------------------------ the call

// Field for field what ragged_attention_cpu.py packs. Strides in elements; the last dimension of every tensor is contiguous.
struct Call {
  char *output, *query, *key, *value, *key_pool, *value_pool;
  const int32_t *cu_seqlens_q, *context_lens, *block_table;  // context_lens null: no pool, keys are the rows themselves
  const int64_t* slot_mapping;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int64_t dtype, threads;
  int64_t rows, query_heads, heads, size, value_size;
  int64_t requests, block_size, num_blocks, max_blocks, table_stride;
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;
  int64_t key_block, key_block_head, key_slot, value_block, value_block_head, value_slot;
  int64_t window, chunk;
  const float *sinks, *slopes;  // [query_heads], or null
  double scale, softcap;
};

enum Status { OK = 0, BAD_ROWS = 1, BAD_CONTEXT = 2, BAD_BLOCK = 3, BAD_SLOT = 4, BAD_DTYPE = 5 };

constexpr int TILE_VECTORS = 64;   // query vectors of a tile
constexpr int FEW_KEYS = 32;       // keys of an iteration of the few kernel
constexpr int TILE_KEYS = 96;      // keys of an iteration of the tile kernel: a multiple of every register tile
constexpr int FEW_SPLIT = 512;     // keys of an item of the few kernel
constexpr int TILE_SPLIT = 1920;   // keys of an item of the tile kernel, where one request has few tiles

struct Item {
  int32_t request, head;
  int32_t vector, vectors;   // first query vector and their number
  int32_t first_key, last_key;
  int32_t split, part;       // -1: alone
};

struct Split {
  int32_t parts, vectors;
  int64_t partial;  // offset of part 0 in the partials
};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Grows and is kept per thread: a fresh allocation of this size is a page fault every 4 KiB.
class Scratch {
 public:
  float* floats(int64_t n) {
    if (n > capacity_) {
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, round_up(n * 4, 4096))));
      capacity_ = memory_ ? n : 0;
      if (!memory_) std::abort();
    }
    return memory_.get();
  }

 private:
  struct Free { void operator()(float* p) const { std::free(p); } };
  std::unique_ptr<float, Free> memory_;
  int64_t capacity_ = 0;
};

thread_local Scratch scratch_of_thread;
thread_local Scratch partials_of_caller;

// Runs body(0), ..., body(count - 1) on up to `threads` threads, in order of their start.
template <typename Body> void parallel_for(const Call& call, int64_t count, int64_t threads, const Body& body) {
  struct Team { std::atomic<int64_t> next; int64_t count; const Body& body; } team{{0}, count, body};
  auto work = [](void* data) {
    auto& team = *static_cast<Team*>(data);
    for (int64_t i; (i = team.next.fetch_add(1, std::memory_order_relaxed)) < team.count;) team.body(i);
  };
  threads = std::min(threads, count);
  if (threads > 1 && call.parallel) call.parallel(work, &team, unsigned(threads), 0);
  else work(&team);
}

template <typename T> class Attention {
 public:
  explicit Attention(const Call& call)
      : call_(call), group_(call.query_heads / call.heads), depth_(round_up(call.size, W)),
        width_(round_up(call.value_size, W)), softcap_(float(call.softcap)),
        scale_(float(call.softcap > 0 ? call.scale / call.softcap : call.scale * LOG2E)) {}

  Status run() {
    if (Status bad = check()) return bad;
    if (call_.context_lens) write_pool();
    plan();
    partials_ = partials_of_caller.floats(partials_size_);
    // Waking a team costs some microseconds; this much work takes one thread 10 to 20 (measured on a Zen 5).
    int64_t threads = work_ < 400'000 ? 1 : call_.threads;
    parallel_for(call_, int64_t(items_.size()), threads, [&](int64_t i) { run_item(items_[i]); });
    T* out = reinterpret_cast<T*>(call_.output);
    int64_t row = call_.query_heads * call_.value_size, used = call_.cu_seqlens_q[call_.requests];
    std::memset(static_cast<void*>(out + used * row), 0, (call_.rows - used) * row * sizeof(T));
    return OK;
  }

 private:
  static constexpr double LOG2E = 1.4426950408889634;
  static constexpr bool PAIRS = HAS_PAIRS && std::is_same_v<T, bf16>;

  int64_t rows(int64_t n) const { return call_.cu_seqlens_q[n + 1] - call_.cu_seqlens_q[n]; }
  int64_t context(int64_t n) const { return call_.context_lens ? call_.context_lens[n] : rows(n); }
  // The first key that a row at `position` sees; the last one is its own.
  int64_t first_seen(int64_t position) const {
    int64_t in_window = call_.window > 0 ? position - call_.window + 1 : 0;
    int64_t in_chunk = call_.chunk > 0 ? position / call_.chunk * call_.chunk : 0;
    return std::max<int64_t>({0, in_window, in_chunk});
  }
  int64_t position(int64_t n, int64_t vector) const { return context(n) - rows(n) + vector / group_; }
  int64_t head_of(const Item& item, int64_t m) const { return item.head * group_ + (item.vector + m) % group_; }
  float slope(const Item& item, int64_t m) const { return float(call_.slopes[head_of(item, m)] * LOG2E); }

  // ---------------------------------------------------------------------------------------------- before the work

  // Nothing has been written yet when this refuses: a wrong table must not become a wild store.
  Status check() const {
    if (call_.cu_seqlens_q[0] != 0 || call_.cu_seqlens_q[call_.requests] > call_.rows) return BAD_ROWS;
    for (int64_t n = 0; n < call_.requests; ++n)
      if (rows(n) < 0) return BAD_ROWS;
    if (!call_.context_lens) return OK;
    for (int64_t n = 0; n < call_.requests; ++n) {
      if (context(n) < rows(n) || context(n) > call_.max_blocks * call_.block_size) return BAD_CONTEXT;
      if (rows(n) == 0) continue;
      const int32_t* table = call_.block_table + n * call_.table_stride;
      int64_t last = (context(n) - 1) / call_.block_size;
      for (int64_t i = first_seen(context(n) - rows(n)) / call_.block_size; i <= last; ++i)
        if (table[i] < 0 || table[i] >= call_.num_blocks) return BAD_BLOCK;
    }
    for (int64_t t = 0; t < call_.rows; ++t)
      if (call_.slot_mapping[t] >= call_.num_blocks * call_.block_size) return BAD_SLOT;
    return OK;
  }

  void write_pool() const {
    auto copy = [&](int64_t t) {
      int64_t slot = call_.slot_mapping[t], block = slot / call_.block_size, offset = slot % call_.block_size;
      if (slot < 0) return;
      const T *key = tensor(call_.key) + t * call_.key_row, *value = tensor(call_.value) + t * call_.value_row;
      T* keys = tensor(call_.key_pool) + block * call_.key_block + offset * call_.key_slot;
      T* values = tensor(call_.value_pool) + block * call_.value_block + offset * call_.value_slot;
      for (int64_t k = 0; k < call_.heads; ++k) {
        std::memcpy(static_cast<void*>(keys + k * call_.key_block_head), key + k * call_.key_head, call_.size * sizeof(T));
        std::memcpy(static_cast<void*>(values + k * call_.value_block_head), value + k * call_.value_head,
                    call_.value_size * sizeof(T));
      }
    };
    int64_t bytes = call_.rows * call_.heads * (call_.size + call_.value_size) * sizeof(T), chunk = 16;
    parallel_for(call_, (call_.rows + chunk - 1) / chunk, bytes < 256 * 1024 ? 1 : call_.threads, [&](int64_t i) {
      for (int64_t t = i * chunk; t < std::min(call_.rows, (i + 1) * chunk); ++t) copy(t);
    });
  }

  void plan() {
    for (bool few : {false, true})  // the long items first
      for (int64_t n = 0; n < call_.requests; ++n) {
        int64_t vectors = rows(n) * group_;
        if (vectors == 0 || (vectors < W) != few) continue;
        int64_t split = few ? FEW_SPLIT : vectors <= 4 * TILE_VECTORS ? TILE_SPLIT : INT32_MAX;
        for (int64_t v = (vectors - 1) / TILE_VECTORS * TILE_VECTORS; v >= 0; v -= TILE_VECTORS)
          for (int64_t k = 0; k < call_.heads; ++k) plan_tile(n, k, v, std::min<int64_t>(TILE_VECTORS, vectors - v), split);
      }
    splits_left_.reset(new std::atomic<int32_t>[splits_.size()]);
    for (size_t i = 0; i < splits_.size(); ++i) splits_left_[i].store(splits_[i].parts, std::memory_order_relaxed);
  }

  void plan_tile(int64_t n, int64_t head, int64_t vector, int64_t vectors, int64_t split) {
    int64_t first = first_seen(position(n, vector)), last = position(n, vector + vectors - 1);
    work_ += (last - first + 1) * (call_.size + call_.value_size) * vectors;
    // Splits start at multiples of `split`, wherever the window starts, so that they are the same in every step.
    int64_t parts = last / split - first / split + 1, id = -1;
    if (parts > 1) {
      id = int64_t(splits_.size());
      splits_.push_back({int32_t(parts), int32_t(vectors), partials_size_});
      partials_size_ += parts * partial_size(vectors);
    }
    for (int64_t part = 0; part < parts; ++part) {
      int64_t begin = std::max(first, (first / split + part) * split);
      int64_t end = std::min(last, (first / split + part + 1) * split - 1);
      items_.push_back({int32_t(n), int32_t(head), int32_t(vector), int32_t(vectors), int32_t(begin), int32_t(end),
                        int32_t(id), int32_t(part)});
    }
  }

  // ---------------------------------------------------------------------------------------------- one item

  // Running softmax of `vectors` query vectors: unnormalised sums [vectors, Dvp], largest score and sum of weights.
  struct State { float *sums, *largest, *weight; };
  static int64_t padded(int64_t vectors) { return round_up(vectors, W); }
  int64_t partial_size(int64_t vectors) const { return padded(vectors) * (width_ + 2); }
  State state_at(float* at, int64_t vectors) const {
    int64_t lanes = padded(vectors);
    return {at, at + lanes * width_, at + lanes * (width_ + 1)};
  }

  void run_item(const Item& item) {
    int64_t lanes = padded(item.vectors), own = partial_size(item.vectors);
    bool few = rows(item.request) * group_ < W;
    float* memory = scratch_of_thread.floats(own + (few ? few_scratch(item.vectors) : tile_scratch(lanes)));
    State state = state_at(memory, item.vectors);
    if (item.split >= 0) state = state_at(partial(item.split, item.part), item.vectors);
    std::fill(state.sums, state.sums + lanes * width_, 0.f);
    std::fill(state.largest, state.largest + lanes, -INFINITY);
    std::fill(state.weight, state.weight + lanes, 0.f);
    if (call_.sinks && item.part == 0)  // one more key of weight 1, counted once
      for (int64_t m = 0; m < item.vectors; ++m) {
        state.largest[m] = float(call_.sinks[head_of(item, m)] * LOG2E);
        state.weight[m] = 1;
      }
    if (few) attend_few(item, state, memory + own);
    else attend_tile(item, state, memory + own);
    if (item.split >= 0) {
      if (splits_left_[item.split].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
      state = merge(item.split, state_at(memory, item.vectors));
    }
    finish(item, state);
  }

  float* partial(int64_t split, int64_t part) const {
    return partials_ + splits_[split].partial + part * partial_size(splits_[split].vectors);
  }

  State merge(int64_t split, State merged) const {
    const Split& whole = splits_[split];
    for (int64_t m = 0; m < whole.vectors; ++m) {
      float largest = -INFINITY, weight = 0;
      for (int64_t p = 0; p < whole.parts; ++p)
        largest = std::max(largest, state_at(partial(split, p), whole.vectors).largest[m]);
      float* sums = merged.sums + m * width_;
      std::fill(sums, sums + width_, 0.f);
      for (int64_t p = 0; p < whole.parts; ++p) {
        State part = state_at(partial(split, p), whole.vectors);
        float factor = exp2(part.largest[m] - largest);
        weight += factor * part.weight[m];
        for (int64_t d = 0; d < width_; d += W)
          store(sums + d, load(sums + d) + factor * load(part.sums + m * width_ + d));
      }
      merged.weight[m] = weight;
    }
    return merged;
  }

  void finish(const Item& item, State state) const {
    for (int64_t m = 0; m < item.vectors; ++m) {
      int64_t row = call_.cu_seqlens_q[item.request] + (item.vector + m) / group_;
      T* to = tensor(call_.output) + (row * call_.query_heads + head_of(item, m)) * call_.value_size;
      const float* sums = state.sums + m * width_;
      float factor = 1 / state.weight[m];
      int64_t d = 0;
      for (; d + W <= call_.value_size; d += W) store(to + d, load(sums + d) * factor);
      if (d == call_.value_size) continue;
      T tail[W];
      store(tail, load(sums + d) * factor);
      std::memcpy(static_cast<void*>(to + d), tail, (call_.value_size - d) * sizeof(T));
    }
  }

  // ---------------------------------------------------------------------------------------------- memory

  static T* tensor(char* p) { return reinterpret_cast<T*>(p); }

  const T* query_vector(const Item& item, int64_t m) const {
    int64_t row = call_.cu_seqlens_q[item.request] + (item.vector + m) / group_;
    return tensor(call_.query) + row * call_.query_row + head_of(item, m) * call_.query_head;
  }

  // Where the keys and values at positions begin, ..., end - 1 lie.
  void locate(const Item& item, int64_t begin, int64_t end, const T** keys, const T** values) const {
    const int32_t* table = call_.block_table + item.request * call_.table_stride;
    int64_t first_row = call_.context_lens ? 0 : call_.cu_seqlens_q[item.request];
    while (begin < end) {
      int64_t block = 0, offset = first_row + begin, run = end - begin;
      if (call_.context_lens) {
        block = table[begin / call_.block_size];
        offset = begin % call_.block_size;
        run = std::min(run, call_.block_size - offset);
      }
      const T* key = tensor(call_.key_pool) + block * call_.key_block + item.head * call_.key_block_head;
      const T* value = tensor(call_.value_pool) + block * call_.value_block + item.head * call_.value_block_head;
      for (int64_t i = 0; i < run; ++i) {
        *keys++ = key + (offset + i) * call_.key_slot;
        *values++ = value + (offset + i) * call_.value_slot;
      }
      begin += run;
    }
  }

  // from[0 : size] as floats, then zeros up to a multiple of W.
  static void widen(float* to, const T* from, int64_t size) {
    int64_t d = 0;
    for (; d + W <= size; d += W) store(to + d, load(from + d));
    if (d == size) return;
    T tail[W] = {};
    std::memcpy(static_cast<void*>(tail), from + d, (size - d) * sizeof(T));
    store(to + d, load(tail));
  }

  // ---------------------------------------------------------------------------------------------- the few kernel

  bool direct_pairs() const { return PAIRS && call_.size % (2 * W) == 0; }
  bool direct_keys() const { return std::is_same_v<T, float> && call_.size % W == 0; }

  int64_t few_scratch(int64_t vectors) const {
    return vectors * (depth_ + FEW_KEYS) + FEW_KEYS * std::max(depth_, width_);
  }

  void attend_few(const Item& item, State state, float* memory) const {
    const int64_t vectors = item.vectors, last = item.last_key + 1;
    float *query = memory, *scores = query + vectors * depth_, *copies = scores + vectors * FEW_KEYS;
    alignas(64) float factor[W], slopes[W];
    alignas(64) int32_t bounds[2][W];
    for (int64_t m = 0; m < vectors; ++m) {
      if (direct_pairs()) std::memcpy(query + m * depth_, query_vector(item, m), call_.size * sizeof(T));
      else widen(query + m * depth_, query_vector(item, m), call_.size);
      int64_t at = position(item.request, item.vector + m);
      bounds[0][m] = int32_t(first_seen(at));
      bounds[1][m] = int32_t(at);
      if (call_.slopes) slopes[m] = slope(item, m);
    }
    const T *keys[2][FEW_KEYS], *values[2][FEW_KEYS];
    // Tiles start at multiples of FEW_KEYS; what lies before the first or behind the last key is never located.
    int64_t begin = item.first_key, end = std::min<int64_t>(last, begin / FEW_KEYS * FEW_KEYS + FEW_KEYS);
    locate(item, begin, end, keys[0], values[0]);
    for (int turn = 0; begin < last; turn ^= 1) {
      int64_t next = std::min<int64_t>(last, end + FEW_KEYS), count = end - begin, ahead = next - end;
      const T **next_keys = keys[turn ^ 1], **next_values = values[turn ^ 1];
      locate(item, end, next, next_keys, next_values);
      for (int64_t i = ahead; i < FEW_KEYS; ++i) next_keys[i] = keys[turn][0];  // something to prefetch, already near
      for (int64_t i = count; i < round_up(count, 4); ++i) values[turn][i] = values[turn][count - 1];
      score_few(query, keys[turn], values[turn], count, vectors, scores, copies);
      if (call_.slopes) soften_few<true>(scores, begin, count, vectors, bounds, slopes, state, factor);
      else soften_few<false>(scores, begin, count, vectors, bounds, slopes, state, factor);
      weigh_few(scores, factor, values[turn], next_keys, count, vectors, state.sums, copies);
      begin = end;
      end = next;
    }
  }

  // scores[m][i] = query m . key i, for i < count; the rest is arbitrary. Values are prefetched line by line meanwhile:
  // blocks lie anywhere, so that the hardware's prefetcher finds no stream, and a burst of prefetches stalls the core.
  void score_few(const float* query, const T** keys, const T** values, int64_t count, int64_t vectors, float* scores,
                 float* copies) const {
    const float* rows[FEW_KEYS];
    bool direct = direct_keys() || direct_pairs();
    for (int64_t i = 0; i < count; ++i)
      if (!direct) widen(copies + i * depth_, keys[i], call_.size);
    for (int64_t i = 0; i < round_up(count, 4); ++i) {  // a tail of less than four keys repeats the last one
      int64_t from = std::min(i, count - 1);
      rows[i] = direct ? reinterpret_cast<const float*>(keys[from]) : copies + from * depth_;
    }
    for (int64_t i = 0; i < count; i += 4)
      for (int64_t m = 0; m < vectors; m += 4) {
        const float* q = query + m * depth_;
        float* to = scores + m * FEW_KEYS + i;
        switch (std::min<int64_t>(4, vectors - m)) {
          case 1: score_few_registers<1>(q, rows + i, values + i, to); break;
          case 2: score_few_registers<2>(q, rows + i, values + i, to); break;
          case 3: score_few_registers<3>(q, rows + i, values + i, to); break;
          default: score_few_registers<4>(q, rows + i, values + i, to);
        }
      }
  }

  template <int M>
  void score_few_registers(const float* query, const float** rows, const T** ahead, float* scores) const {
    if (direct_pairs()) score_few_registers<M, PAIRS>(query, rows, ahead, scores, call_.size / 2);
    else score_few_registers<M, false>(query, rows, ahead, scores, depth_);
  }

  template <int M, bool PAIR_DOTS>
  void score_few_registers(const float* query, const float** rows, const T** ahead, float* scores, int64_t words) const {
    const float *k0 = rows[0], *k1 = rows[1], *k2 = rows[2], *k3 = rows[3];
    const T *v0 = ahead[0], *v1 = ahead[1], *v2 = ahead[2], *v3 = ahead[3];
    constexpr int64_t STEP = PAIR_DOTS ? 2 : 1;  // values in a word
    vf sum[M][4] = {};
    for (int64_t d = 0; d < words; d += W) {
      vf key[4] = {load(k0 + d), load(k1 + d), load(k2 + d), load(k3 + d)};
      __builtin_prefetch(v0 + d * STEP);
      __builtin_prefetch(v1 + d * STEP);
      __builtin_prefetch(v2 + d * STEP);
      __builtin_prefetch(v3 + d * STEP);
      if (M > 1)
        for (vf& k : key) pin(k);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        vf q = load(query + m * depth_ + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[m][i] = multiply_add<PAIR_DOTS>(sum[m][i], q, key[i]);
      }
    }
    for (int m = 0; m < M; ++m) sum4(scores + m * FEW_KEYS, sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
  }

  // A score in base 2 from a dot product.
  vf base2(vf dot) const { return softcap_ > 0 ? tanh(dot * scale_) * float(softcap_ * LOG2E) : dot * scale_; }

  // Turns the dot products at positions begin, ... into weights; factor[m]: what the sums so far are multiplied by.
  template <bool SLOPED>
  void soften_few(float* scores, int64_t begin, int64_t count, int64_t vectors, const int32_t (*bounds)[W],
                  const float* slopes, State state, float* factor) const {
    alignas(64) float top[W], sum[W];
    store(top, splat(-INFINITY));
    for (int64_t m = 0; m < vectors; ++m) {
      vi first = splat(bounds[0][m]), last = splat(std::min(bounds[1][m], int32_t(begin + count - 1)));
      vf best = splat(-INFINITY);
      for (int64_t i = 0; i < count; i += W) {
        vi at = lanes() + int32_t(begin + i);
        float* score = scores + m * FEW_KEYS + i;
        vf biased = base2(load(score));
        if constexpr (SLOPED) biased += slopes[m] * __builtin_convertvector(at - bounds[1][m], vf);
        vf kept = select((at >= first) & (at <= last), biased, splat(-INFINITY));
        store(score, kept);
        best = larger(kept, best);
      }
      top[m] = largest(best);
    }
    vf before = load(state.largest), now = larger(before, load(top)), base = select(now == -INFINITY, vf{}, now);
    store(state.largest, now);
    store(top, base);
    store(factor, exp2(before - base));
    store(sum, vf{});
    for (int64_t m = 0; m < vectors; ++m) {
      vf weights{};
      for (int64_t i = 0; i < count; i += W) {
        float* score = scores + m * FEW_KEYS + i;
        vf p = exp2(load(score) - top[m]);
        store(score, p);
        weights += p;
      }
      sum[m] = total(weights);
    }
    store(state.weight, load(state.weight) * load(factor) + load(sum));
  }

  // sums[m] = sums[m] * factor[m] + sum over i of weights[m][i] * value i
  void weigh_few(const float* weights, const float* factor, const T** values, const T** ahead, int64_t count,
                 int64_t vectors, float* sums, float* copies) const {
    if (call_.value_size % W == 0 && (std::is_same_v<T, float> || vectors <= 4))
      return weigh_few_rows(weights, factor, values, ahead, count, vectors, sums);
    const float* rows[FEW_KEYS];
    for (int64_t i = 0; i < count; ++i) {
      rows[i] = copies + i * width_;
      widen(copies + i * width_, values[i], call_.value_size);
    }
    weigh_few_rows(weights, factor, rows, ahead, count, vectors, sums);
  }

  template <typename S>
  void weigh_few_rows(const float* weights, const float* factor, const S** rows, const T** ahead, int64_t count,
                      int64_t vectors, float* sums) const {
    for (int64_t m = 0; m < vectors; m += 4) {
      const float* w = weights + m * FEW_KEYS;
      float* to = sums + m * width_;
      switch (std::min<int64_t>(4, vectors - m)) {
        case 1: weigh_few_vectors<1>(w, factor + m, rows, ahead, count, to); break;
        case 2: weigh_few_vectors<2>(w, factor + m, rows, ahead, count, to); break;
        case 3: weigh_few_vectors<3>(w, factor + m, rows, ahead, count, to); break;
        default: weigh_few_vectors<4>(w, factor + m, rows, ahead, count, to);
      }
    }
  }

  template <int M, typename S>
  void weigh_few_vectors(const float* weights, const float* factor, const S** rows, const T** ahead, int64_t count,
                         float* sums) const {
    constexpr int J = 4;
    int64_t d = 0;
    for (; d + J * W <= width_; d += J * W) weigh_few_registers<M, J>(weights, factor, rows, ahead, count, sums, d);
    for (; d < width_; d += W) weigh_few_registers<M, 1>(weights, factor, rows, ahead, count, sums, d);
  }

  template <int M, int J, typename S>
  void weigh_few_registers(const float* weights, const float* factor, const S** rows, const T** ahead, int64_t count,
                           float* sums, int64_t d) const {
    vf sum[M][J];
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < J; ++j) sum[m][j] = load(sums + m * width_ + d + j * W) * factor[m];
    for (int64_t i = 0; i < count; ++i) {
      const S* row = rows[i] + d;
      for (int line = 0; line < J * W * int(sizeof(T)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(ahead[i] + d) + line);
      vf value[J];
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) value[j] = load(row + j * W);
      if (M > 1)
        for (vf& v : value) pin(v);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        vf w = splat(weights[m * FEW_KEYS + i]);
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) sum[m][j] += w * value[j];
      }
    }
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < J; ++j) store(sums + m * width_ + d + j * W, sum[m][j]);
  }

  // ---------------------------------------------------------------------------------------------- the tile kernel

  // Words of 4 bytes of a query vector or key: floats, or pairs of bfloat16.
  int64_t words() const { return PAIRS ? (call_.size + 1) / 2 : call_.size; }

  int64_t tile_scratch(int64_t lanes) const {
    return lanes * words() + TILE_KEYS * (lanes + words() + width_) + 4 * lanes;
  }

  struct Tile {
    float* query;       // [panel][words][lanes of the panel]
    float* keys;        // [TILE_KEYS][words]
    float* values;      // [TILE_KEYS][Dvp]; pairs: [TILE_KEYS / 2][Dvp]
    float* scores;      // [TILE_KEYS][lanes], later the weights; pairs: [TILE_KEYS / 2][lanes]
    float* factor;      // [lanes]
    int32_t *first, *last;  // [lanes] positions that a vector sees
    float* slopes;      // [lanes]
    int64_t lanes;
  };

  void attend_tile(const Item& item, State state, float* memory) const {
    Tile tile;
    tile.lanes = padded(item.vectors);
    tile.query = memory;
    tile.scores = tile.query + tile.lanes * words();
    tile.values = tile.scores + TILE_KEYS * tile.lanes;
    tile.factor = tile.values + TILE_KEYS * width_;
    tile.first = reinterpret_cast<int32_t*>(tile.factor + tile.lanes);
    tile.last = tile.first + tile.lanes;
    tile.slopes = reinterpret_cast<float*>(tile.last + tile.lanes);
    tile.keys = tile.slopes + tile.lanes;
    pack_query(item, tile);
    for (int64_t m = 0; m < tile.lanes; ++m) {
      int64_t vector = std::min<int64_t>(m, item.vectors - 1), at = position(item.request, item.vector + vector);
      tile.first[m] = int32_t(first_seen(at));
      tile.last[m] = int32_t(at);
      if (call_.slopes) tile.slopes[m] = slope(item, vector);
    }
    const int64_t last = item.last_key + 1;
    for (int64_t begin = item.first_key, end; begin < last; begin = end) {
      end = std::min<int64_t>(last, begin / TILE_KEYS * TILE_KEYS + TILE_KEYS);
      const T *keys[TILE_KEYS], *values[TILE_KEYS];
      locate(item, begin, end, keys, values);
      pack_keys(keys, end - begin, tile);
      score_tile(end - begin, tile);
      if (call_.slopes) soften_tile<true>(begin, end - begin, tile, state);
      else soften_tile<false>(begin, end - begin, tile, state);
      pack_values(values, end - begin, tile);
      weigh_tile(end - begin, tile, state);
    }
  }

  void pack_query(const Item& item, const Tile& tile) const {
    std::fill(tile.query, tile.query + tile.lanes * words(), 0.f);
    for (int64_t m = 0; m < item.vectors; ++m) {
      int64_t panel = m / (PANEL * W), panel_lanes = std::min<int64_t>(PANEL * W, tile.lanes - panel * PANEL * W);
      char* to = reinterpret_cast<char*>(tile.query + panel * PANEL * W * words() + m % (PANEL * W));
      const T* from = query_vector(item, m);
      for (int64_t d = 0; d < call_.size; ++d) {
        if constexpr (PAIRS) std::memcpy(to + (d / 2 * panel_lanes) * 4 + d % 2 * 2, from + d, 2);
        else if constexpr (std::is_same_v<T, float>) std::memcpy(to + d * panel_lanes * 4, from + d, 4);
        else {
          T one[W] = {from[d]};
          float value = load(one)[0];
          std::memcpy(to + d * panel_lanes * 4, &value, 4);
        }
      }
    }
  }

  // score_tile runs over up to 11 keys more than there are: whatever lies there, their scores are not looked at.
  void pack_keys(const T** keys, int64_t count, const Tile& tile) const {
    for (int64_t i = 0; i < count; ++i) {
      float* to = tile.keys + i * words();
      if constexpr (PAIRS) {
        if (call_.size % 2) to[words() - 1] = 0;
        std::memcpy(to, keys[i], call_.size * sizeof(T));
      } else {
        int64_t d = 0;
        for (; d + W <= call_.size; d += W) store(to + d, load(keys[i] + d));
        if (d < call_.size) {
          T tail[W] = {};
          float wide[W];
          std::memcpy(static_cast<void*>(tail), keys[i] + d, (call_.size - d) * sizeof(T));
          store(wide, load(tail));
          std::memcpy(to + d, wide, (call_.size - d) * 4);
        }
      }
    }
  }

  void pack_values(const T** values, int64_t count, const Tile& tile) const {
    if constexpr (PAIRS) {
      for (int64_t i = 0; i < count; i += 2) {
        const T *even = values[i], *odd = i + 1 < count ? values[i + 1] : nullptr;
        float* to = tile.values + i / 2 * width_;
        for (int64_t d = 0; d < call_.value_size; d += W) {
          vf low = load_some(even + d, call_.value_size - d), high = odd ? load_some(odd + d, call_.value_size - d) : vf{};
          store(to + d, (vf)((vu)low >> 16 | (vu)high));
        }
      }
    } else {
      for (int64_t i = 0; i < count; ++i) widen(tile.values + i * width_, values[i], call_.value_size);
    }
  }

  static vf load_some(const T* from, int64_t count) {
    if (count >= W) return load(from);
    T some[W] = {};
    std::memcpy(static_cast<void*>(some), from, count * sizeof(T));
    return load(some);
  }

  void score_tile(int64_t count, const Tile& tile) const {
    for (int64_t lane = 0; lane < tile.lanes; lane += PANEL * W) {
      const float* query = tile.query + lane * words();
      float* scores = tile.scores + lane;
      switch (std::min<int64_t>(PANEL, (tile.lanes - lane) / W)) {
        case 1: score_panel<1>(query, count, tile, scores); break;
        case 2: score_panel<2>(query, count, tile, scores); break;
        case 3: score_panel<std::min(3, PANEL)>(query, count, tile, scores); break;
        default: score_panel<PANEL>(query, count, tile, scores);
      }
    }
  }

  template <int J> void score_panel(const float* query, int64_t count, const Tile& tile, float* scores) const {
    constexpr int R = std::min(12, ACCUMULATORS / J);  // keys of a register tile
    const int64_t depth = words();
    for (int64_t i = 0; i < count; i += R) {
      const float* keys = tile.keys + i * depth;
      vf sum[R][J] = {};
      for (int64_t d = 0; d < depth; ++d) {
        vf q[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) q[j] = load(query + (d * J + j) * W);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          vf key = splat(keys[r * depth + d]);
#pragma GCC unroll 4
          for (int j = 0; j < J; ++j) sum[r][j] = multiply_add<PAIRS>(sum[r][j], q[j], key);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < J; ++j) store(scores + (i + r) * tile.lanes + j * W, sum[r][j]);
    }
  }

  template <bool SLOPED> void soften_tile(int64_t begin, int64_t count, const Tile& tile, State state) const {
    for (int64_t lane = 0; lane < tile.lanes; lane += W) {
      float* scores = tile.scores + lane;
      vi first = read<vi>(tile.first + lane), last = read<vi>(tile.last + lane);
      vf largest_score = load(state.largest + lane), top = largest_score, slopes{};
      if constexpr (SLOPED) slopes = load(tile.slopes + lane);
      for (int64_t i = 0; i < count; ++i) {
        vi at = splat(int32_t(begin + i));
        vf biased = base2(load(scores + i * tile.lanes));
        if constexpr (SLOPED) biased += slopes * __builtin_convertvector(at - last, vf);
        vf score = select((at >= first) & (at <= last), biased, splat(-INFINITY));
        store(scores + i * tile.lanes, score);
        top = larger(score, top);
      }
      vf base = select(top == -INFINITY, vf{}, top), factor = exp2(largest_score - base), sum{};
      for (int64_t i = 0; i < count; i += PAIRS ? 2 : 1) {
        vf p = exp2(load(scores + i * tile.lanes) - base);
        sum += p;
        if constexpr (PAIRS) {
          vf odd = i + 1 < count ? exp2(load(scores + (i + 1) * tile.lanes) - base) : vf{};
          sum += odd;
          store(scores + i / 2 * tile.lanes, make_pairs(p, odd));
        } else {
          store(scores + i * tile.lanes, p);
        }
      }
      store(state.largest + lane, top);
      store(state.weight + lane, load(state.weight + lane) * factor + sum);
      store(tile.factor + lane, factor);
    }
  }

  void weigh_tile(int64_t count, const Tile& tile, State state) const {
    constexpr int R = W == 16 ? 8 : 4, J = 3;  // 24 or 12 accumulators
    int64_t keys = PAIRS ? (count + 1) / 2 : count;
    for (int64_t d = 0; d < width_; d += J * W)
      for (int64_t m = 0; m < tile.lanes; m += R)
        switch (std::min<int64_t>(J, (width_ - d) / W)) {
          case 1: weigh_registers<R, 1>(keys, tile, state, m, d); break;
          case 2: weigh_registers<R, 2>(keys, tile, state, m, d); break;
          default: weigh_registers<R, J>(keys, tile, state, m, d);
        }
  }

  template <int R, int J> void weigh_registers(int64_t keys, const Tile& tile, State state, int64_t m, int64_t d) const {
    float* sums = state.sums + m * width_ + d;
    const float *weights = tile.scores + m, *values = tile.values + d;
    vf sum[R][J];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int j = 0; j < J; ++j) sum[r][j] = load(sums + r * width_ + j * W) * tile.factor[m + r];
    for (int64_t i = 0; i < keys; ++i, weights += tile.lanes, values += width_) {
      vf value[J];
#pragma GCC unroll 3
      for (int j = 0; j < J; ++j) value[j] = load(values + j * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        vf weight = splat(weights[r]);
#pragma GCC unroll 3
        for (int j = 0; j < J; ++j) sum[r][j] = multiply_add<PAIRS>(sum[r][j], weight, value[j]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int j = 0; j < J; ++j) store(sums + r * width_ + j * W, sum[r][j]);
  }

  const Call& call_;
  const int64_t group_, depth_, width_;
  const float softcap_, scale_;
  std::vector<Item> items_;
  std::vector<Split> splits_;
  std::unique_ptr<std::atomic<int32_t>[]> splits_left_;
  int64_t partials_size_ = 0, work_ = 0;
  float* partials_ = nullptr;
};

}  // namespace

extern "C" int selective_attention(const void* packed) {
  Call call;
  std::memcpy(&call, packed, sizeof call);
  switch (call.dtype) {
    case 0: return Attention<float>(call).run();
    case 1: return Attention<bf16>(call).run();
    case 2: return Attention<fp16>(call).run();
    default: return BAD_DTYPE;
  }
}
