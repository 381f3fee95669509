// The ops with a state for CPUs: each request's rows one after another, with the state in a thread's own scratch.
//
// Legend
//   block   the unit of an op: a head, or some channels or columns of one, whose state does not touch that of another
//   group   requests whose rows a thread takes one after another for the same block, so that what the block needs
//           beside the state is prepared once for many requests of one row
//   W       floats in a SIMD vector
//
// State and sums are float32; rows are widened as they are read. What a request's result is depends on its own rows and
// state alone, never on the batch or the number of threads. The work is (group, block), longest requests first.
//
// Reading order: state_call (what is given), this file (who does what), then one file for each op.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "causal_conv1d_cpu.h"
#include "gated_delta_rule_cpu.h"
#include "linear_recurrence_cpu.h"
#include "mlstm_cpu.h"
#include "selective_scan_cpu.h"
#include "ssd_cpu.h"
#include "state_call.h"
#include "wkv_cpu.h"

namespace {

constexpr int64_t GROUP_ROWS = 8;

class Requests {
 public:
  // Those with rows, longest first. Nothing is written if the call is refused.
  Status read(const Call& call) {
    const int32_t* bounds = call.cu_seqlens_q;
    if (bounds[0] != 0) return BAD_ROWS;
    for (int64_t n = 0; n < call.requests; ++n) {
      const int64_t begin = bounds[n], rows = bounds[n + 1] - begin;
      if (rows < 0 || begin + rows > call.rows) return BAD_ROWS;
      if (rows == 0) continue;
      if (!call.pool) {
        all_.push_back({begin, rows, nullptr, true});
        continue;
      }
      const int64_t slot = call.state_slots[n];
      if (call.context_lens[n] < rows) return BAD_CONTEXT;
      if (slot < 0 || slot >= call.slots) return BAD_SLOT;
      all_.push_back({begin, rows, call.pool + slot * call.slot_bytes, call.context_lens[n] == rows});
    }
    std::stable_sort(all_.begin(), all_.end(), [](const Request& a, const Request& b) { return a.rows > b.rows; });
    int64_t taken = GROUP_ROWS;
    for (int64_t n = 0; n < int64_t(all_.size()); ++n)
      if (taken + all_[n].rows > GROUP_ROWS) starts_.push_back(n), taken = all_[n].rows;
      else taken += all_[n].rows;
    starts_.push_back(int64_t(all_.size()));
    return OK;
  }

  int64_t groups() const { return int64_t(starts_.size()) - 1; }
  const Request* group(int64_t i) const { return all_.data() + starts_[i]; }
  int64_t count(int64_t i) const { return starts_[i + 1] - starts_[i]; }

 private:
  std::vector<Request> all_;
  std::vector<int64_t> starts_;
};

template <typename Op> Status run(const Call& call) {
  Requests requests;
  if (Status bad = requests.read(call)) return bad;
  const Op op(call);
  const int64_t used = call.cu_seqlens_q[call.requests], blocks = op.blocks();
  // Waking a team costs some microseconds; so many steps of a number of the state take one thread 10 to 70 of them,
  // depending on the op (measured on a Zen 5 that had other work).
  const int64_t steps = used * call.heads * call.size * std::max<int64_t>(call.value_size, 1);
  parallel_for(call, requests.groups() * blocks, steps < 100'000 ? 1 : call.threads, [&](int64_t i) {
    op.run(i % blocks, requests.group(i / blocks), requests.count(i / blocks));
  });
  const int64_t row = call.heads * std::max<int64_t>(call.value_size, 1) * bytes_of(call.output_dtype);
  if (used < call.rows) std::memset(call.output + used * row, 0, (call.rows - used) * row);
  return OK;
}

template <typename T> Status run_conv(const Call& call) {
  switch (call.size) {
    case 2: return run<CausalConv1d<T, 2>>(call);
    case 3: return run<CausalConv1d<T, 3>>(call);
    case 4: return run<CausalConv1d<T, 4>>(call);
    default: return run<CausalConv1d<T, 0>>(call);
  }
}

}  // namespace

extern "C" int selective_state(const void* packed) {
  Call call;
  std::memcpy(&call, packed, sizeof call);
  switch (call.op) {
    case 0:
      return call.output_dtype == 0 ? run_conv<float>(call)
             : call.output_dtype == 1 ? run_conv<bf16>(call) : run_conv<fp16>(call);
    case 1: return run<SelectiveScan>(call);
    case 2: return run<Ssd>(call);
    case 3: return run<GatedDeltaRule>(call);
    case 4: return run<LinearRecurrence>(call);
    case 5: return run<Wkv>(call);
    case 6: return run<Mlstm>(call);
    default: return BAD_OP;
  }
}
