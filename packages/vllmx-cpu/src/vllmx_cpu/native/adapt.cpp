// VX: per instruction set
// What the adapters of rows add to a product: y += B (A x), in place, for the tokens whose row has one.
//
// Two phases with a barrier between them: all A x into the workspace, a few ranks of some rows at a time, then
// B times them, some columns of some rows at a time. A token's sums do not depend on other tokens: over the
// features in lanes of 16, then rank by rank.
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxLowRank {
  const void* a;  // (r, K) filled up to whole lanes, of an embedding (V, r) float32; null: no change
  const void* b;  // (r, N) in tiles (r, TILE) of columns, one behind the other, filled up with zeros
  int32_t rank;
  int32_t begin, end;  // of the columns of y
};

struct VxAdapt {
  const VxLowRank* changes;  // (slots, parts)
  const float* x;            // (T, K), or (L, K); null: the tokens' ids
  float* y;                  // (T, N) or (L, N)
  float* shrunk;             // (rows, parts, rank)
  int32_t parts, rank;       // the most of both
  int32_t cols, width;       // K, N
  int32_t pooled;            // 1: y has a row for each logit row, 2: x has too
  int32_t half;              // 1: the numbers are bf16, else float32
};

namespace {

enum { ROWS = 8, RANKS = 4, COLUMNS = 256, TILE = 64 };

struct Rows {
  const VxAdapt* a;
  const VxStep* step;

  int32_t count() const { return a->pooled ? step->L : step->T; }
  int32_t token(int32_t row) const { return a->pooled ? step->logit_rows[row] : row; }
  const VxLowRank* change(int32_t row, int32_t part) const {
    const int32_t slot = step->adapters[token(row)];
    if (slot < 0) return nullptr;
    const VxLowRank* found = a->changes + (size_t)slot * a->parts + part;
    return found->a ? found : nullptr;
  }
  const float* x(int32_t row) const { return a->x + (size_t)(a->pooled == 1 ? token(row) : row) * a->cols; }
  float* shrunk(int32_t row, int32_t part) const { return a->shrunk + ((size_t)row * a->parts + part) * a->rank; }
};

VX_INLINE F32x16 numbers(const float* p) { return load(p); }
VX_INLINE F32x16 numbers(const uint16_t* p) { return load_bf16(p); }
VX_INLINE int lanes(int32_t left, int j) { return left - 16 * j < 16 ? left - 16 * j : 16; }
VX_INLINE size_t filled(int32_t width) { return ((size_t)width + 15) / 16 * 16; }

// `ranks` sums over all features.
template <class T>
VX_INLINE void dots(const float* x, const T* a, int32_t cols, int32_t ranks, float* to) {
  F32x16 sums[RANKS] = {zero(), zero(), zero(), zero()};
  const size_t stride = filled(cols);
  const T* rows[RANKS];
  for (int32_t j = 0; j < RANKS; ++j) rows[j] = a + stride * (j < ranks ? j : 0);
  for_lanes(cols, [&](int32_t k, int n) {
    const F32x16 v = load_some(x + k, n);
    for (int32_t j = 0; j < RANKS; ++j) sums[j] = fma(v, numbers(rows[j] + k), sums[j]);
  });
  for (int32_t j = 0; j < ranks; ++j) to[j] = reduce_add(sums[j]);
}

template <class T>
VX_INLINE void shrink(const Rows& rows, int32_t row, int32_t part, int32_t first) {
  const VxLowRank* change = rows.change(row, part);
  if (!change || first >= change->rank) return;
  const int32_t left = change->rank - first, ranks = left < RANKS ? left : (int32_t)RANKS;
  float* to = rows.shrunk(row, part) + first;
  const int32_t cols = rows.a->cols;
  if (rows.a->x) return dots(rows.x(row), (const T*)change->a + first * filled(cols), cols, ranks, to);
  const float* from = (const float*)change->a + (size_t)rows.step->tokens[row] * change->rank + first;
  for (int32_t j = 0; j < ranks; ++j) to[j] = from[j];
}

// Columns from `begin` on of a change, at most COLUMNS; y is its first one.
template <class T>
VX_INLINE void expand(const VxLowRank* change, const float* shrunk, float* y, int32_t begin) {
  const int32_t width = change->end - change->begin, end = begin + COLUMNS < width ? begin + COLUMNS : width;
  for (int32_t i = begin; i < end; i += TILE) {
    const T* b = (const T*)change->b + (size_t)i * change->rank;  // the tile, rank by rank
    const int32_t left = end - i;
    F32x16 sums[TILE / 16];
    for (int j = 0; j < TILE / 16; ++j) sums[j] = left > 16 * j ? load_some(y + i + 16 * j, lanes(left, j)) : zero();
    for (int32_t r = 0; r < change->rank; ++r, b += TILE) {
      const F32x16 factor = splat(shrunk[r]);
      for (int j = 0; j < TILE / 16; ++j) sums[j] = fma(factor, numbers(b + 16 * j), sums[j]);
    }
    for (int j = 0; j < TILE / 16; ++j)
      if (left > 16 * j) store_some(y + i + 16 * j, sums[j], lanes(left, j));
  }
}

template <class T>
void run(const VxAdapt* a, const VxStep* step, VxCtx* ctx) {
  const Rows rows = {a, step};
  const int32_t count = rows.count(), groups = (count + ROWS - 1) / ROWS;
  const int32_t pieces = (a->rank + RANKS - 1) / RANKS, units = groups * a->parts * pieces;
  for (int32_t unit; (unit = vx_next(ctx)) < units;) {
    const int32_t piece = unit % pieces, part = unit / pieces % a->parts, first = unit / pieces / a->parts * ROWS;
    for (int32_t row = first; row < first + ROWS && row < count; ++row) shrink<T>(rows, row, part, piece * RANKS);
  }
  vx_barrier(ctx);
  const int32_t spans = (a->width + COLUMNS - 1) / COLUMNS, blocks = spans * a->parts;
  for (int32_t unit; (unit = vx_next(ctx)) < groups * blocks;) {
    const int32_t first = unit / blocks * ROWS, part = unit % blocks / spans, begin = unit % spans * COLUMNS;
    for (int32_t row = first; row < first + ROWS && row < count; ++row) {
      const VxLowRank* change = rows.change(row, part);
      if (!change || change->end - change->begin <= begin) continue;
      expand<T>(change, rows.shrunk(row, part), a->y + (size_t)row * a->width + change->begin, begin);
    }
  }
}

}  // namespace

void adapt(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxAdapt* a = (const VxAdapt*)args;
  if (!step->adapters) return;
  a->half ? run<uint16_t>(a, step, ctx) : run<float>(a, step, ctx);
}
VX_OP(adapt, VxAdapt)

}  // namespace VX_ISA
}  // namespace vx
