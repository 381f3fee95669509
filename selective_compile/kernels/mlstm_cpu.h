// mlstm (xLSTM): lanes run along Dv; the gates and what a row is divided by come first, then blocks of columns.
//
// heads H, size D, value_size Dv, scale, extra eps; inputs query, key [T, H, D], value [T, H, Dv], input_gate, decay
// [T, H]; slot [H, D + 1, Dv + 1]: the state, its normaliser n as last column, and m in the last row's corner.

#pragma once

#include <cmath>

#include "state_call.h"

namespace {

class Mlstm {
 public:
  static constexpr int64_t COLUMNS = 4 * W;  // of a block: four sums at once

  explicit Mlstm(const Call& call)
      : call_(call), depth_(round_up(call.size, W)), width_(call.value_size + 1),
        head_floats_((call.size + 1) * width_) {}

  int64_t blocks() const { return call_.heads; }

  void run(int64_t head, const Request* requests, int64_t count) const {
    for (const Request* request = requests; request < requests + count; ++request) run_request(*request, head);
  }

 private:
  // What a row does to the state, and what it is divided by: as many of each as rows.
  struct Gates { float *kept, *added, *factor; };

  void run_request(const Request& request, int64_t head) const {
    const int64_t offset = head * head_floats_, rows = request.rows;
    float* memory = scratch_of_thread.floats(3 * depth_ + 3 * rows + COLUMNS + call_.size * COLUMNS);
    float *key = memory, *query = key + depth_, *normaliser = query + depth_, *value = normaliser + depth_;
    float* state = value + COLUMNS;
    const Gates gates = {state + call_.size * COLUMNS, state + call_.size * COLUMNS + rows,
                         state + call_.size * COLUMNS + 2 * rows};
    const float *before = request.before(offset), largest = open_gates(request, head, before, key, normaliser, gates);
    float* after = request.after(offset);
    for (int64_t first = 0; first < call_.value_size; first += COLUMNS) {
      const int64_t columns = std::min<int64_t>(COLUMNS, call_.value_size - first);
      load_state(state, before ? before + first : nullptr, call_.size, columns, COLUMNS, width_);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t t = request.begin + i;
        read_row(query, call_.inputs[0], t, head, 0, call_.size);
        read_row(key, call_.inputs[1], t, head, 0, call_.size);
        std::fill(value, value + COLUMNS, 0.f);
        read_row(value, call_.inputs[2], t, head, first, columns);
        advance(state, gates.kept[i], gates.added[i], gates.factor[i], key, query, value);
        write_row(call_, (t * call_.heads + head) * call_.value_size + first, value, columns);
      }
      keep_state(after ? after + first : nullptr, state, call_.size, columns, COLUMNS, width_);
    }
    if (!after) return;
    for (int64_t d = 0; d < call_.size; ++d) after[d * width_ + call_.value_size] = normaliser[d];
    std::fill(after + call_.size * width_, after + head_floats_ - 1, 0.f);
    after[head_floats_ - 1] = largest;
  }

  // Returns the largest exponent after the last row, and leaves the normaliser after it.
  float open_gates(const Request& request, int64_t head, const float* before, float* key, float* normaliser,
                   const Gates& gates) const {
    float* query = key + depth_;
    std::fill(normaliser, normaliser + depth_, 0.f);
    for (int64_t d = 0; before && d < call_.size; ++d) normaliser[d] = before[d * width_ + call_.value_size];
    float largest = before ? before[head_floats_ - 1] : 0.f;
    for (int64_t i = 0; i < request.rows; ++i) {
      const int64_t t = request.begin + i;
      read_row(query, call_.inputs[0], t, head, 0, call_.size);
      read_row(key, call_.inputs[1], t, head, 0, call_.size);
      const float gate = read_one(call_.inputs[3], t, head), faded = largest + read_one(call_.inputs[4], t, head);
      largest = faded > gate ? faded : gate;
      gates.kept[i] = std::exp(faded - largest);
      gates.added[i] = std::exp(gate - largest);
      vf sum = {};
      for (int64_t d = 0; d < depth_; d += W) {
        vf n = load(normaliser + d) * gates.kept[i] + load(key + d) * gates.added[i];
        store(normaliser + d, n);
        sum += n * load(query + d);
      }
      const float scale = float(call_.scale), answer = std::fabs(total(sum) * scale), least = std::exp(-largest);
      gates.factor[i] = scale / ((answer > least ? answer : least) + float(call_.extra));
    }
    return largest;
  }

  // Of one row: value comes in and the result goes out by the same memory.
  void advance(float* state, float kept, float added, float factor, const float* key, const float* query,
               float* value) const {
    vf update[4], sum[4] = {};
    for (int v = 0; v < 4; ++v) update[v] = load(value + v * W) * added;
    for (int64_t d = 0, size = call_.size; d < size; ++d, state += COLUMNS)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        vf s = load(state + v * W) * kept + update[v] * key[d];
        store(state + v * W, s);
        sum[v] += s * query[d];
      }
    for (int v = 0; v < 4; ++v) store(value + v * W, sum[v] * factor);
  }

  const Call& call_;
  const int64_t depth_, width_, head_floats_;
};

}  // namespace
