// VX: per instruction set
// Each channel over its last few tokens: y[t] = act(bias + w[0] x[t - K + 1] + ... + w[K - 1] x[t]).
//
// The unit of work is some channels of a row, all its tokens: a state is read and written by one thread.
#include "activation.h"
#include "row_loops.h"
#include "state.h"

namespace vx {
namespace VX_ISA {

struct VxShortConv {
  const float* x;     // (T, C)
  const float* w;     // (K, C)
  const float* bias;  // (C) or null
  float* y;           // (T, C)
  VxStates states;    // (K - 1, C), the oldest token first
  int32_t channels, kernel;
  int32_t activation; // VxActivation
};

namespace {

enum { CHANNELS = 512, MAX_KERNEL = 16 };

// Tokens of a row, `token` counted from its first one in this step; those before it lie in the state.
struct Tokens {
  const VxShortConv& a;
  const VxStep* step;
  int32_t first;
  const float* x;      // the row's first
  const float* taps;   // null: zeros

  F32x16 at(int32_t token, int32_t channel, int n) const {
    if (token >= 0) return load_some(x + (size_t)token * a.channels + channel, n);
    return taps ? load_some(taps + (size_t)(token + a.kernel - 1) * a.channels + channel, n) : zero();
  }
};

// The K - 1 newest tokens of sixteen channels, into a state.
VX_INLINE void keep_lanes(const VxShortConv& a, const F32x16* seen, float* kept, int32_t channel, int n) {
  for (int32_t i = 0; i < a.kernel - 1; ++i) store_some(kept + (size_t)i * a.channels + channel, seen[i], n);
}

// Sixteen channels of a row. The newest tokens stay in registers while the row passes.
VX_INLINE void run_lanes(const VxShortConv& a, const Tokens& tokens, int32_t count, float* y, float* kept,
                         int32_t channel, int n) {
  const int32_t before = a.kernel - 1;
  F32x16 seen[MAX_KERNEL];
  for (int32_t i = 0; i < before; ++i) seen[i] = tokens.at(i - before, channel, n);
  const F32x16 bias = a.bias ? load_some(a.bias + channel, n) : zero();
  for (int32_t t = 0; t < count; ++t) {
    seen[before] = tokens.at(t, channel, n);
    F32x16 sum = bias;
    for (int32_t i = 0; i < a.kernel; ++i)
      sum = fma(seen[i], load_some(a.w + (size_t)i * a.channels + channel, n), sum);
    if (a.activation >= 0) sum = activate(sum, a.activation);
    store_some(y + (size_t)t * a.channels + channel, sum, n);
    for (int32_t i = 0; i < before; ++i) seen[i] = seen[i + 1];
    if (float* after = a.states.after(tokens.step, tokens.first + t)) keep_lanes(a, seen, after, channel, n);
  }
  keep_lanes(a, seen, kept, channel, n);
}

}  // namespace

void short_conv(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxShortConv& a = *(const VxShortConv*)args;
  const int32_t parts = (a.channels + CHANNELS - 1) / CHANNELS, units = step->R * parts;
  for (int32_t unit; (unit = vx_next(ctx)) < units;) {
    const int32_t row = unit / parts, first = unit % parts * CHANNELS, start = step->query_start[row];
    const int32_t width = a.channels - first < CHANNELS ? a.channels - first : (int32_t)CHANNELS;
    const size_t begin = (size_t)start * a.channels;
    const Tokens tokens = {a, step, start, a.x + begin, a.states.source(step, row)};
    float* kept = a.states.target(step, row);
    for_lanes(width, [&](int32_t i, int n) {
      run_lanes(a, tokens, step->query_start[row + 1] - start, a.y + begin, kept, first + i, n);
    });
  }
}
VX_OP(short_conv, VxShortConv)

}  // namespace VX_ISA
}  // namespace vx
