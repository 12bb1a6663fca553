// VX: per instruction set
// One entry for each window of tokens: a softmax over them, channel by channel, then norm and RoPE.
//
// Sums go over tokens in order, whatever a step has of a window, so that chunks change no bits. A row's first
// windows and what it leaves behind depend on its state and are one unit of work; each later window is one
// of its own, and looks at the tokens of the step alone.
#include "attention_heads.h"
#include "entries.h"
#include "state.h"

namespace vx {
namespace VX_ISA {

struct VxCompress {
  const float* kv_gate;  // (T, 2 * S * D)
  const float* rope;     // (positions, Dr) cos | sin
  const float* bias;     // (ratio, S, D)
  const float* norm;     // (D)
  void* pages;
  VxStates states;       // (S, 3, D)
  int32_t size, series, ratio, rotary_dim;  // D, S, tokens of a window, Dr
  int32_t block_size, kv_dtype, group;
  float norm_eps;
};

namespace {

// The sums of a window's entry and, with two series, of the next one's: greatest gate, sum, weighted rows.
class Sums {
 public:
  Sums(const VxCompress& a, const VxStep& step, float* room) : a_(a), step_(step), room_(room) {}

  void clear() { __builtin_memset(room_, 0, bytes()); }
  void read(const float* state) { state ? (void)__builtin_memcpy(room_, state, bytes()) : clear(); }
  void write(float* state) const { __builtin_memcpy(state, room_, bytes()); }

  // A window begins: what was for the next entry is for this one.
  void turn() {
    const size_t one = (size_t)3 * a_.size;
    if (a_.series > 1) __builtin_memcpy(room_, room_ + one, one * sizeof(float));
    __builtin_memset(room_ + (a_.series - 1) * one, 0, one * sizeof(float));
  }

  // Token t of the step: its last series counts for this entry, the one before it for the next.
  void add(int32_t t) {
    const int32_t in_window = step_.positions[t] % a_.ratio;
    for (int32_t s = 0; s < a_.series; ++s) add_series(t, in_window, s);
  }

  // Token t for this entry alone.
  void add_own(int32_t t) { add_to(t, step_.positions[t] % a_.ratio, a_.series - 1, room_); }

  // The sums where a window begins at token `start`, out of the window before it, which the step has.
  void begin_window(int32_t start) {
    clear();
    if (a_.series == 1) return;
    for (int32_t t = start - a_.ratio; t < start; ++t) add_to(t, step_.positions[t] % a_.ratio, 0, room_);
  }

  // Writes the entry of the window that ends with token t.
  void entry(int32_t t, float* row) const {
    const float *total = room_ + a_.size, *found = total + a_.size;
    for_lanes(a_.size, [&](int32_t i, int n) {
      store_some(row + i, load_some(found + i, n) / select(first_lanes(n), load_some(total + i, n), splat(1.0f)), n);
    });
    norm_head(row, a_.norm, a_.norm_eps, a_.size, row);
    const int32_t first = step_.positions[t] + 1 - a_.ratio;
    rotate_pairs(row + a_.size - a_.rotary_dim, a_.rope + (size_t)first * a_.rotary_dim, a_.rotary_dim);
    const EntryPages pages = {(uint8_t*)a_.pages, a_.kv_dtype, a_.block_size, a_.ratio, a_.size};
    const int32_t slot = step_.slots[(size_t)a_.group * step_.T + t];
    pages.write(row, pages.row(slot / a_.block_size, slot % a_.block_size));
  }

 private:
  size_t bytes() const { return (size_t)a_.series * 3 * a_.size * sizeof(float); }

  void add_series(int32_t t, int32_t in_window, int32_t s) {
    add_to(t, in_window, a_.series - 1 - s, room_ + (size_t)s * 3 * a_.size);
  }

  void add_to(int32_t t, int32_t in_window, int32_t series, float* sums) {
    const int32_t size = a_.size, whole = a_.series * size;
    const float* kv = a_.kv_gate + (size_t)t * 2 * whole + series * size;
    const float* bias = a_.bias + (size_t)in_window * whole + series * size;
    float *top = sums, *total = sums + size, *found = total + size;
    for_lanes(size, [&](int32_t i, int n) {
      const F32x16 gate = load_some(kv + whole + i, n) + load_some(bias + i, n), old = load_some(total + i, n);
      const F32x16 most = select(old == zero(), gate, load_some(top + i, n));
      const F32x16 higher = select(gate > most, gate, most);
      const F32x16 before = exp(most - higher), now = exp(gate - higher);
      store_some(top + i, higher, n);
      store_some(total + i, fma(before, old, now), n);
      store_some(found + i, fma(before, load_some(found + i, n), now * load_some(kv + i, n)), n);
    });
  }

  const VxCompress& a_;
  const VxStep& step_;
  float* room_;
};

// The first `held` windows of a row, which may begin before the step, and the row's state after it.
void run_begin(const VxCompress& a, const VxStep& step, int32_t row, int32_t held, Sums* sums, float* room) {
  const int32_t begin = step.query_start[row], end = step.query_start[row + 1];
  const int32_t first = step.positions[begin] / a.ratio, last = step.positions[end - 1] / a.ratio;
  const bool all = last - first < held || step.state_after;  // states of tokens in between are wanted, too
  sums->read(a.states.source(&step, row));
  for (int32_t t = begin; t < end; ++t) {
    const int32_t in_window = step.positions[t] % a.ratio;
    const bool own = step.positions[t] / a.ratio - first < held;
    if (!own && !all) break;
    if (in_window == 0) sums->turn();
    sums->add(t);
    if (in_window == a.ratio - 1 && own) sums->entry(t, room);
    if (float* after = a.states.after(&step, t)) sums->write(after);
  }
  if (!all) {
    const int32_t start = begin + last * a.ratio - step.positions[begin];
    sums->begin_window(start);
    for (int32_t t = start; t < end; ++t) sums->add(t);
  }
  sums->write(a.states.target(&step, row));
}

}  // namespace

void compress(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxCompress& a = *(const VxCompress*)args;
  float* room = (float*)ctx->scratch;
  Sums sums(a, *step, room + a.size);
  for (int32_t unit = vx_next(ctx), row = 0, base = 0; row < step->R; ++row) {
    const int32_t begin = step->query_start[row], end = step->query_start[row + 1];
    const int32_t first = step->positions[begin], last = step->positions[end - 1];
    // Windows up to the second one (of one series: the first) need the state, unless they begin the text.
    const int32_t held = a.series, all = (last + 1) / a.ratio - first / a.ratio;
    const int32_t units = 1 + (all > held ? all - held : 0);
    for (; unit < base + units; unit = vx_next(ctx)) {
      if (unit == base) {
        run_begin(a, *step, row, held, &sums, room);
        continue;
      }
      const int32_t window = first / a.ratio + held + unit - base - 1;
      const int32_t start = begin + window * a.ratio - first;
      sums.begin_window(start);
      for (int32_t t = start; t < start + a.ratio; ++t) sums.add_own(t);
      sums.entry(start + a.ratio - 1, room);
    }
    base += units;
  }
}
VX_OP(compress, VxCompress)

}  // namespace VX_ISA
}  // namespace vx
