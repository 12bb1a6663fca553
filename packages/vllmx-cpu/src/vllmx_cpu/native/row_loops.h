// How ops that work on one token's row at a time share the rows and walk along one.
#pragma once
#include "simd.h"
#include "vx.h"

namespace vx {
namespace VX_ISA {

enum { ROWS_AT_ONCE = 4 };

// Calls `body(row)` for this thread's share of the T rows.
template <class Body>
VX_INLINE void for_rows(const VxStep* step, VxCtx* ctx, Body body) {
  for (int32_t first; (first = vx_next(ctx) * ROWS_AT_ONCE) < step->T;) {
    const int32_t end = first + ROWS_AT_ONCE < step->T ? first + ROWS_AT_ONCE : step->T;
    for (int32_t row = first; row < end; ++row) body(row);
  }
}

// Calls `body(i, n)` for columns i ... i + n - 1, n = 16 but at the end.
template <class Body>
VX_INLINE void for_lanes(int32_t width, Body body) {
  int32_t i = 0;
  for (; i + 16 <= width; i += 16) body(i, 16);
  if (i < width) body(i, width - i);
}

VX_INLINE F32x16 load_some(const float* p, int n) { return n == 16 ? load(p) : load_n(p, n); }
VX_INLINE void store_some(float* p, F32x16 v, int n) {
  if (n == 16)
    store(p, v);
  else
    store_n(p, v, n);
}

}  // namespace VX_ISA
}  // namespace vx
