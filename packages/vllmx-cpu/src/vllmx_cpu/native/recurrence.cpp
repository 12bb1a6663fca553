// VX: per instruction set
// A recurrence over the tokens of a row: S = decay * S; S += k u^T; o = S^T q, token by token.
//
// The unit of work is a head of a row, or some narrow ones. Its state lies as tiles of 32 columns, one behind the other, each of Dk
// rows: 16 KiB where Dk is 128, so that a tile stays in the first cache while tokens pass. One walk over
// a tile does a token's update and what the next token asks of the state (S^T k), so that each token
// reads and writes the tile once. Sums go over rows in order, whatever the number of tokens.
#include "row_loops.h"
#include "softplus.h"
#include "state.h"

namespace vx {
namespace VX_ISA {

struct VxRecurrence {
  const float* qkv;      // (T, 2 * Hk * Dk + H * Dv)
  const float* a;        // (T, H), or (T, H * Dk) if channels is 1
  const float* b;        // (T, H) before its sigmoid; null for the rule ssd
  const float* a_log;    // (H), or (H * Dk) if channels is 2
  const float* dt_bias;  // as wide as a
  const float* d;        // (H) or null
  float* out;            // (T, H * Dv)
  VxStates states;       // of H heads: tiles of COLS columns, the last one narrower, each (Dk, columns)
  int32_t heads, key_heads, key_size, value_size;
  int32_t delta;         // 1: the delta rule; 0: ssd
  int32_t channels;      // a decay for each channel of the keys, 1: by steps (delta), 2: by rates (ssd)
  int32_t tiled;         // 1: head h reads key head h % Hk, else h / (H / Hk)
  float scale, beta, norm_eps, dt_min, dt_max;
};

namespace {

enum { COLS = 32, TOKENS = 16 };

VX_INLINE float first_lane(F32x16 v) {
  float lanes[16];
  store(lanes, v);
  return lanes[0];
}

// What the tokens of a chunk bring to one head: rows of `pitch` numbers, one for each channel of the keys.
struct Chunk {
  float *k, *q;
  float* decay;             // of each row of the state
  float* asked;             // k * decay: what a state is asked for before it decays
  float strength[TOKENS];   // beta, or dt

  Chunk(uint8_t* scratch, int32_t pitch) : k((float*)scratch) {
    const size_t floats = (size_t)TOKENS * pitch;
    q = k + floats, decay = q + floats, asked = decay + floats;
  }
};

// One head of the layer.
struct Head {
  const VxRecurrence& a;
  int32_t head, key_head, width;

  Head(const VxRecurrence& args, int32_t index) : a(args), head(index) {
    key_head = a.tiled ? head % a.key_heads : head / (a.heads / a.key_heads);
    width = 2 * a.key_heads * a.key_size + a.heads * a.value_size;
  }
  size_t floats() const { return (size_t)a.key_size * a.value_size; }
  const float* query(int32_t token) const { return a.qkv + (size_t)token * width + key_head * a.key_size; }
  const float* key(int32_t token) const { return query(token) + a.key_heads * a.key_size; }
  const float* value(int32_t token) const {
    return a.qkv + (size_t)token * width + 2 * a.key_heads * a.key_size + head * a.value_size;
  }
  float* out(int32_t token) const { return a.out + ((size_t)token * a.heads + head) * a.value_size; }
};

// The factor that makes a key or a query as long as it is used.
VX_INLINE float length_factor(const VxRecurrence& a, const float* x) {
  if (!a.delta) return 1.0f;
  F32x16 sum = zero();
  for_lanes(a.key_size, [&](int32_t i, int n) {
    const F32x16 v = load_some(x + i, n);
    sum = fma(v, v, sum);
  });
  return 1.0f / __builtin_sqrtf(reduce_add(sum) + a.norm_eps);
}

// Step sizes of sixteen channels, and what a state keeps of each of its rows.
VX_INLINE F32x16 decay_of(const VxRecurrence& a, F32x16 x, float rate, F32x16* step) {
  const F32x16 dt = softplus(x), low = splat(a.dt_min), high = splat(a.dt_max);
  const F32x16 above = select(dt < low, low, dt);
  *step = select(above > high, high, above);  // NaN stays NaN
  return exp(*step * splat(rate));
}

// Queries, keys, decays and strengths of tokens first ... first + count - 1.
void prepare(const Head& h, int32_t first, int32_t count, int32_t pitch, Chunk* chunk) {
  const VxRecurrence& a = h.a;
  const float rate = a.channels == 2 ? 0.0f : -first_lane(exp(splat(a.a_log[h.head])));
  const float* rates = a.a_log + (size_t)h.head * a.key_size;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t token = first + i;
    const size_t at = (size_t)i * pitch;
    const float *key = h.key(token), *query = h.query(token);
    const F32x16 key_factor = splat(length_factor(a, key));
    const F32x16 query_factor = splat(length_factor(a, query) * a.scale);
    const float *x = a.a + (size_t)token * a.heads + h.head, *bias = a.dt_bias + h.head;
    if (a.channels == 1) x = a.a + ((size_t)token * a.heads + h.head) * a.key_size, bias = a.dt_bias + h.head * a.key_size;
    F32x16 step = zero(), decay = zero();
    if (a.channels != 1) decay = decay_of(a, splat(*x + *bias), rate, &step);
    for_lanes(a.key_size, [&](int32_t c, int n) {
      if (a.channels == 1) decay = decay_of(a, load_some(x + c, n) + load_some(bias + c, n), rate, &step);
      if (a.channels == 2) decay = exp(-exp(load_some(rates + c, n)) * step);
      const F32x16 k = load_some(key + c, n) * key_factor;
      store_some(chunk->k + at + c, k, n);
      store_some(chunk->q + at + c, load_some(query + c, n) * query_factor, n);
      store_some(chunk->decay + at + c, decay, n);
      store_some(chunk->asked + at + c, k * decay, n);
    });
    if (a.delta) step = splat(a.beta) / (splat(1.0f) + exp(splat(-a.b[(size_t)token * a.heads + h.head])));
    chunk->strength[i] = first_lane(step);
  }
}

// Columns of a tile, as two vectors.
struct Columns {
  int low, high;  // lanes of each
  explicit Columns(int32_t columns) : low(columns < 16 ? columns : 16), high(columns - low) {}
  int32_t pitch() const { return low + high; }
};
struct Pair {
  F32x16 lo, hi;
};
VX_INLINE Pair load_pair(const float* p, Columns c) {
  return {load_some(p, c.low), c.high ? load_some(p + 16, c.high) : zero()};
}
VX_INLINE void store_pair(float* p, Pair v, Columns c) {
  store_some(p, v.lo, c.low);
  if (c.high) store_some(p + 16, v.hi, c.high);
}
VX_INLINE Pair add_scaled(F32x16 factor, Pair x, Pair sum) {
  return {fma(factor, x.lo, sum.lo), fma(factor, x.hi, sum.hi)};
}

// S^T k of the first token, before the state decays.
VX_INLINE Pair ask(const VxRecurrence& a, const float* state, const float* asked, Columns c) {
  Pair found = {zero(), zero()};
  for (int32_t i = 0; i < a.key_size; ++i)
    found = add_scaled(splat(asked[i]), load_pair(state + (size_t)i * c.pitch(), c), found);
  return found;
}

// One token's update of a tile and its output; returns what the next token asks of it.
template <bool asks>
VX_INLINE Pair update(const VxRecurrence& a, float* state, const Chunk& chunk, size_t at, Pair u,
                      const float* next, Columns c, Pair* out) {
  Pair found = {zero(), zero()}, sum = {zero(), zero()};
  const float *k = chunk.k + at, *q = chunk.q + at, *decay = chunk.decay + at;
  for (int32_t i = 0; i < a.key_size; ++i) {
    float* row = state + (size_t)i * c.pitch();
    Pair s = load_pair(row, c);
    const F32x16 kept = splat(decay[i]);
    s = add_scaled(splat(k[i]), u, {s.lo * kept, s.hi * kept});
    store_pair(row, s, c);
    sum = add_scaled(splat(q[i]), s, sum);
    if (asks) found = add_scaled(splat(next[i]), s, found);
  }
  *out = sum;
  return found;
}

// A chunk of tokens through the columns `first_column` ... of a head.
template <class C>
VX_INLINE void run_tile(const Head& h, const VxStep* step, float* state, int32_t column, C c, const Chunk& chunk,
                        int32_t pitch, int32_t first, int32_t count) {
  const VxRecurrence& a = h.a;
  const size_t tile = h.head * h.floats() + (size_t)column * a.key_size;
  Pair found = {zero(), zero()};
  if (a.delta) found = ask(a, state, chunk.asked, c);
  for (int32_t i = 0; i < count; ++i) {
    const Pair v = load_pair(h.value(first + i) + column, c);
    const F32x16 strength = splat(chunk.strength[i]);
    const Pair u = {(v.lo - found.lo) * strength, (v.hi - found.hi) * strength};
    const size_t at = (size_t)i * pitch;
    const bool asks = a.delta && i + 1 < count;
    Pair out;
    found = asks ? update<true>(a, state, chunk, at, u, chunk.asked + at + pitch, c, &out)
                 : update<false>(a, state, chunk, at, u, nullptr, c, &out);
    if (a.d) out = add_scaled(splat(a.d[h.head]), v, out);
    store_pair(h.out(first + i) + column, out, c);
    if (float* kept = a.states.after(step, first + i)) bring_state(state, kept + tile, (size_t)a.key_size * c.pitch());
  }
}

void run_head(const Head& h, const VxStep* step, int32_t row, uint8_t* scratch) {
  const VxRecurrence& a = h.a;
  const int32_t pitch = (a.key_size + 15) / 16 * 16;
  float* state = a.states.target(step, row) + h.head * h.floats();
  const float* source = a.states.source(step, row);
  bring_state(source ? source + h.head * h.floats() : nullptr, state, h.floats());
  Chunk chunk(scratch, pitch);
  const int32_t end = step->query_start[row + 1];
  for (int32_t first = step->query_start[row]; first < end; first += TOKENS) {
    const int32_t count = end - first < TOKENS ? end - first : TOKENS;
    prepare(h, first, count, pitch, &chunk);
    for (int32_t column = 0; column < a.value_size; column += COLS) {
      const int32_t columns = a.value_size - column < COLS ? a.value_size - column : COLS;
      float* tile = state + (size_t)column * a.key_size;
      if (columns == COLS)
        run_tile(h, step, tile, column, Columns(COLS), chunk, pitch, first, count);
      else
        run_tile(h, step, tile, column, Columns(columns), chunk, pitch, first, count);
    }
  }
}

}  // namespace

void recurrence(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxRecurrence* a = (const VxRecurrence*)args;
  const int32_t size = a->value_size < 16 ? 16 : 1;  // of Mamba 1, a head has one column: several are a unit
  const int32_t groups = (a->heads + size - 1) / size, units = step->R * groups;
  for (int32_t unit; (unit = vx_next(ctx)) < units;) {
    const int32_t first = unit % groups * size, end = first + size < a->heads ? first + size : a->heads;
    for (int32_t head = first; head < end; ++head) run_head(Head(*a, head), step, unit / groups, ctx->scratch);
  }
}
VX_OP(recurrence, VxRecurrence)

}  // namespace VX_ISA
}  // namespace vx
