// Activations as the micro kernels read them: panels of tokens, each [units][tokens], so that the inner
// loop reads both operands from front to back, rounded to what the weights' kind multiplies.
#pragma once
#include "product.h"
#include "simd.h"

namespace vx {
namespace VX_ISA {

// Up to here each thread packs for itself: what is only rounded, and what is quantised, which is more work.
enum { PRIVATE_PANEL_BYTES = 256 << 10, PRIVATE_QUANTISED_BYTES = 16 << 10 };
template <class Kind>
static constexpr size_t PRIVATE_BYTES = Kind::QUANTISED ? PRIVATE_QUANTISED_BYTES : PRIVATE_PANEL_BYTES;
template <class Kind>
static constexpr int32_t PARTS = Kind::QUANTISED ? 4 : 1;

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
static void pack_panel(const Product& a, const Panels& p, int32_t panel, int32_t part, int32_t parts) {
  const int32_t begin = p.begin(panel), tokens = p.begin(panel + 1) - begin;
  const int32_t first = p.units * part / parts, last = p.units * (part + 1) / parts;
  uint8_t* out = p.base + (size_t)begin * p.units * Kind::PANEL_BYTES;
  for (int32_t t = 0; t < tokens; ++t)
    pack_row<Kind>(&a.w, a.row(begin + t), first, last, tokens, out + t * Kind::PANEL_BYTES);
}

// Panels of `size` rows.
template <class Kind>
static Panels panels_of(const Product& a, int32_t size) {
  Panels p = {};
  p.rows = a.rows, p.size = size;
  p.units = (a.w.cols + Kind::UNIT_COLS - 1) / Kind::UNIT_COLS;
  p.count = (a.rows + size - 1) / size;
  p.bytes = (size_t)a.rows * p.units * Kind::PANEL_BYTES;
  return p;
}
// The fewest panels of at most MOST rows, all of about the same size.
template <class Kind>
static Panels even_panels(const Product& a, int32_t most) {
  const int32_t count = (a.rows + most - 1) / most;
  return panels_of<Kind>(a, (a.rows + count - 1) / count);
}

}  // namespace VX_ISA
}  // namespace vx
