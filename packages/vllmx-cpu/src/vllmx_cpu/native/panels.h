// Activations as `linear` reads them: cut into panels of tokens, each [units][tokens], so that the inner
// loop reads both operands from front to back, rounded to what the weights' kind multiplies. Few are
// packed by every thread for itself (no barrier); many are packed together.
#pragma once
#include "ops.h"
#include "simd.h"

namespace vx {
namespace VX_ISA {

// Up to here each thread packs for itself: what is only rounded, and what is quantised, which is more work.
enum { PRIVATE_PANEL_BYTES = 256 << 10, PRIVATE_QUANTISED_BYTES = 16 << 10 };

struct Panels {
  const uint8_t* base;
  int32_t rows, units, count, size;  // count panels of `size` rows, the last one of fewer

  int32_t begin(int32_t panel) const { return panel < count ? panel * size : rows; }
};

VX_INLINE const float* activation_row(const VxLinear* a, const VxStep* step, int32_t row) {
  return a->x + (size_t)(a->logit_rows ? step->logit_rows[row] : row) * (size_t)a->w.cols;
}

// Calls visit(activations, u) for the units first ... last - 1 of a row x, in the weights' order of columns. A last unit that is wider than what is left of the row is filled up with zeros.
template <int COLS, class Visit>
VX_INLINE void for_units(const VxWeight* w, const float* x, int32_t first, int32_t last, Visit visit) {
  const int32_t cols = w->cols;
  for (int32_t u = first; u < last; ++u) {
    const int32_t k = u * COLS;
    if (!w->columns && cols - k >= COLS) {
      visit(x + k, u);
      continue;
    }
    float unit[COLS];
    for (int32_t i = 0; i < COLS; ++i)
      unit[i] = k + i >= cols ? 0.0f : x[w->columns ? w->columns[k + i] : k + i];
    visit(unit, u);
  }
}

// One token's activations, of quantised kinds those of units first ... last - 1, into its column of a panel
// of `tokens` columns.
template <class Kind>
static void pack_row(const VxWeight* w, const float* x, int32_t first, int32_t last, int32_t tokens,
                     uint8_t* out) {
  const int32_t cols = w->cols;
  const size_t stride = (size_t)tokens * Kind::PANEL_BYTES;
  if constexpr (Kind::QUANTISED) {
    for_units<Kind::UNIT_COLS>(w, x, first, last, [&](const float* unit, int32_t u) {
      Kind::pack_unit(unit, out + (size_t)u * stride);
    });
  } else if constexpr (Kind::UNIT_COLS == 32) {
    for (int32_t k = 0; k < cols; k += 32, out += stride) Kind::round_unit(x + k, cols - k, out);
  } else {
    for (int32_t k = 0; k < cols; k += 16) {
      const int32_t left = cols - k < 16 ? cols - k : 16;
      const F32x16 v = left == 16 ? load(x + k) : load_n(x + k, left);
      float lanes[16];
      if (Kind::PANEL_BYTES * Kind::UNIT_COLS == 8)  // pairs of bf16 in one word
        store_bf16((uint16_t*)lanes, v);
      else
        store(lanes, v);
      const int32_t units = (left + Kind::UNIT_COLS - 1) / Kind::UNIT_COLS;
      for (int32_t u = 0; u < units; ++u, out += stride)
        __builtin_memcpy(out, (const uint8_t*)lanes + u * Kind::PANEL_BYTES, Kind::PANEL_BYTES);
    }
  }
}

// Part `part` of `parts` of a panel: a range of its units, so that threads write to lines of their own.
template <class Kind>
static void pack_panel(const VxLinear* a, const VxStep* step, Panels p, int32_t panel, int32_t part,
                       int32_t parts, uint8_t* base) {
  const int32_t begin = p.begin(panel), tokens = p.begin(panel + 1) - begin;
  const int32_t first = p.units * part / parts, last = p.units * (part + 1) / parts;
  uint8_t* out = base + (size_t)begin * p.units * Kind::PANEL_BYTES;
  for (int32_t t = 0; t < tokens; ++t)
    pack_row<Kind>(&a->w, activation_row(a, step, begin + t), first, last, tokens, out + t * Kind::PANEL_BYTES);
}

// The rows of this step as panels of `size` rows.
template <class Kind>
static Panels pack(const VxLinear* a, const VxStep* step, int32_t rows, int32_t size, VxCtx* ctx) {
  Panels p;
  p.rows = rows;
  p.units = (a->w.cols + Kind::UNIT_COLS - 1) / Kind::UNIT_COLS;
  p.count = (rows + size - 1) / size;
  p.size = size;
  const size_t bytes = (size_t)rows * p.units * Kind::PANEL_BYTES;
  const size_t most = Kind::QUANTISED ? PRIVATE_QUANTISED_BYTES : PRIVATE_PANEL_BYTES;
  const int32_t parts = Kind::QUANTISED ? 4 : 1;
  const bool alone = bytes <= most && bytes <= ctx->scratch_bytes;
  p.base = alone ? ctx->scratch : (const uint8_t*)a->panels;
  if (alone) {
    for (int32_t i = 0; i < p.count; ++i) pack_panel<Kind>(a, step, p, i, 0, 1, ctx->scratch);
  } else {
    for (int32_t i; (i = vx_next(ctx)) < p.count * parts;)
      pack_panel<Kind>(a, step, p, i / parts, i % parts, parts, (uint8_t*)a->panels);
    vx_barrier(ctx);
  }
  return p;
}

}  // namespace VX_ISA
}  // namespace vx
