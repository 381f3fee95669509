// The threads of a kernel, and the memory that each of them keeps.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

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

// Runs body(0), ..., body(count - 1) on up to `threads` threads, in order of their start. `call.parallel` is the entry of
// torch's own OpenMP runtime, or null: a second runtime would fight it for the cores.
template <typename Call, typename Body>
void parallel_for(const Call& call, int64_t count, int64_t threads, const Body& body) {
  struct Team { std::atomic<int64_t> next; int64_t count; const Body& body; } team{{0}, count, body};
  auto work = [](void* data) {
    auto& team = *static_cast<Team*>(data);
    for (int64_t i; (i = team.next.fetch_add(1, std::memory_order_relaxed)) < team.count;) team.body(i);
  };
  threads = std::min(threads, count);
  if (threads > 1 && call.parallel) call.parallel(work, &team, unsigned(threads), 0);
  else work(&team);
}

}  // namespace
