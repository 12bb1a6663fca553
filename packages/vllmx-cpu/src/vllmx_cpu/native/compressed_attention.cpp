// VX: per instruction set
// Attention to a window of rows and to compressed entries, which are key and value at once.
//
// The unit of work is some heads of a token. Keys are taken in the order of positions, the window's first, in
// chunks counted from the query's own first key, so that the bits depend on nothing but the query's context.
#include "attention_heads.h"
#include "entries.h"
#include "state.h"

namespace vx {
namespace VX_ISA {

struct VxCompressedAttention {
  const float* q;         // (T, H * D)
  const float* row;       // (T, D)
  float* out;             // (T, H * D)
  const float* rope;      // (positions, Dr) cos | sin
  const float* sinks;     // (H)
  const int32_t* picked;  // (T, num_picked) entries, then -1; or null: all
  void* pages;            // or null: no entries
  float* workspace;       // (T, D) rotated rows
  VxStates states;        // (window - 1, D)
  int32_t heads, size, rotary_dim, window;  // H, D, Dr
  int32_t ratio, num_picked;
  int32_t block_size, kv_dtype, group;
  float scale, norm_eps;
};

namespace {

enum { KEYS = 32, HEADS = 8 };

// What a thread works in: keys of a chunk; queries, sums and softmax of some heads.
struct Room {
  float *keys, *queries, *sums;
  float scores[KEYS], top[HEADS], total[HEADS];

  Room(const VxCompressedAttention& a, VxCtx* ctx)
      : keys((float*)ctx->scratch), queries(keys + KEYS * a.size), sums(queries + HEADS * a.size) {}
};

// x / sqrt(mean(x^2) + eps), its last numbers rotated.
void query_head(const VxCompressedAttention& a, const float* x, int32_t position, float* out) {
  F32x16 squares = zero();
  for_lanes(a.size, [&](int32_t i, int n) {
    const F32x16 v = load_some(x + i, n);
    squares = fma(v, v, squares);
  });
  const F32x16 factor = splat(1.0f / __builtin_sqrtf(reduce_add(squares) / (float)a.size + a.norm_eps));
  for_lanes(a.size, [&](int32_t i, int n) { store_some(out + i, load_some(x + i, n) * factor, n); });
  rotate_pairs(out + a.size - a.rotary_dim, a.rope + (size_t)position * a.rotary_dim, a.rotary_dim);
}

float dot(const float* x, const float* y, int32_t size) {
  F32x16 sum = zero();
  for_lanes(size, [&](int32_t i, int n) { sum = fma(load_some(x + i, n), load_some(y + i, n), sum); });
  return reduce_add(sum);
}

// `count` keys for all heads of the unit.
void attend(const VxCompressedAttention& a, int32_t heads, int32_t count, Room* room) {
  for (int32_t h = 0; h < heads; ++h) {
    float *sums = room->sums + h * a.size, top = room->top[h];
    for (int32_t k = 0; k < KEYS; ++k) room->scores[k] = -__builtin_inff();
    for (int32_t k = 0; k < count; ++k) {
      room->scores[k] = dot(room->queries + h * a.size, room->keys + k * a.size, a.size) * a.scale;
      top = room->scores[k] > top || room->scores[k] != room->scores[k] ? room->scores[k] : top;
    }
    const F32x16 before = exp(splat(room->top[h] - top));
    F32x16 total = zero();
    for (int32_t k = 0; k < KEYS; k += 16) {
      const F32x16 p = exp(load(room->scores + k) - splat(top));
      store(room->scores + k, p);
      total = total + p;
    }
    float factor[16];
    store(factor, before);
    room->top[h] = top, room->total[h] = room->total[h] * factor[0] + reduce_add(total);
    for_lanes(a.size, [&](int32_t i, int n) {
      F32x16 sum = load_some(sums + i, n) * before;
      for (int32_t k = 0; k < count; ++k)
        sum = fma(splat(room->scores[k]), load_some(room->keys + k * a.size + i, n), sum);
      store_some(sums + i, sum, n);
    });
  }
}

// Some heads of a token, `row` being its row and `begin` the row's first token in the step.
void run_unit(const VxCompressedAttention& a, const VxStep& step, int32_t row, int32_t token, int32_t first_head,
              Room* room) {
  const int32_t position = step.positions[token], begin = step.query_start[row], ring = a.window - 1;
  const int32_t heads = a.heads - first_head < HEADS ? a.heads - first_head : (int32_t)HEADS;
  const size_t at = ((size_t)token * a.heads + first_head) * a.size;
  for (int32_t h = 0; h < heads; ++h) {
    query_head(a, a.q + at + h * a.size, position, room->queries + h * a.size);
    room->top[h] = a.sinks[first_head + h], room->total[h] = 1.0f;
  }
  __builtin_memset(room->sums, 0, sizeof(float) * heads * a.size);
  const float* kept = a.states.source(&step, row);
  const int32_t start = step.positions[begin], earliest = kept ? 0 : start;
  const int32_t oldest = position - ring > earliest ? position - ring : earliest;
  int32_t count = 0;
  const auto next = [&] {
    if (++count < KEYS) return;
    attend(a, heads, count, room);
    count = 0;
  };
  for (int32_t p = oldest; p <= position; ++p, next())
    __builtin_memcpy(room->keys + count * a.size,
                     p < start ? kept + (size_t)(p % ring) * a.size : a.workspace + (size_t)(begin + p - start) * a.size,
                     a.size * sizeof(float));
  if (a.pages) {
    const EntryPages pages = {(uint8_t*)a.pages, a.kv_dtype, a.block_size, a.ratio, a.size};
    const int32_t* table = step.block_tables + ((size_t)a.group * step.R + row) * step.block_stride;
    const int32_t* picked = a.picked ? a.picked + (size_t)token * a.num_picked : nullptr;
    const int32_t most = picked ? a.num_picked : (position + 1) / a.ratio;
    for (int32_t i = 0; i < most && !(picked && picked[i] < 0); ++i, next())
      pages.read(pages.entry(table, picked ? picked[i] : i), room->keys + count * a.size);
  }
  if (count > 0) attend(a, heads, count, room);
  float back[kMaxHeadSize];  // a rotation by the negative angle
  const float* table = a.rope + (size_t)position * a.rotary_dim;
  for (int32_t i = 0; i < a.rotary_dim; ++i) back[i] = i < a.rotary_dim / 2 ? table[i] : -table[i];
  for (int32_t h = 0; h < heads; ++h) {
    float* out = a.out + at + h * a.size;
    const F32x16 factor = splat(1.0f / room->total[h]);
    for_lanes(a.size, [&](int32_t i, int n) {
      store_some(out + i, load_some(room->sums + h * a.size + i, n) * factor, n);
    });
    rotate_pairs(out + a.size - a.rotary_dim, back, a.rotary_dim);
  }
}

// Leaves a row's newest tokens in its state, and in those that keep what is there after a token.
void keep_rows(const VxCompressedAttention& a, const VxStep& step, int32_t row) {
  const int32_t begin = step.query_start[row], end = step.query_start[row + 1], ring = a.window - 1;
  float* target = a.states.target(&step, row);
  bring_state(a.states.source(&step, row), target, (size_t)ring * a.size);
  for (int32_t t = begin; t < end; ++t) {
    __builtin_memcpy(target + (size_t)(step.positions[t] % ring) * a.size, a.workspace + (size_t)t * a.size,
                     a.size * sizeof(float));
    if (float* after = a.states.after(&step, t)) __builtin_memcpy(after, target, sizeof(float) * ring * a.size);
  }
}

}  // namespace

void compressed_attention(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxCompressedAttention& a = *(const VxCompressedAttention*)args;
  for_rows(step, ctx, [&](int32_t token) {
    float* row = a.workspace + (size_t)token * a.size;
    __builtin_memcpy(row, a.row + (size_t)token * a.size, a.size * sizeof(float));
    rotate_pairs(row + a.size - a.rotary_dim, a.rope + (size_t)step->positions[token] * a.rotary_dim, a.rotary_dim);
  });
  vx_barrier(ctx);
  Room room(a, ctx);
  const int32_t parts = (a.heads + HEADS - 1) / HEADS;
  for (int32_t unit, row = 0; (unit = vx_next(ctx)) < step->T * parts;) {
    const int32_t token = unit / parts;
    while (step->query_start[row + 1] <= token) ++row;
    run_unit(a, *step, row, token, unit % parts * HEADS, &room);
  }
  vx_barrier(ctx);
  for (int32_t row; (row = vx_next(ctx)) < step->R;) keep_rows(a, *step, row);
}
VX_OP(compressed_attention, VxCompressedAttention)

}  // namespace VX_ISA
}  // namespace vx
