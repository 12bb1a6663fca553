// What follows the sums of `linear`: bias, gated activation or softcap, and the store.
#pragma once
#include "activation.h"
#include "ops.h"

namespace vx {
namespace VX_ISA {

// One tile's sums c: [tokens][32], of the rows from `row` on.
VX_INLINE void finish_tile(const VxLinear* a, int32_t tile, int32_t row, int32_t tokens, const float* c) {
  const VxWeight* w = &a->w;
  const int32_t features = w->rows / 2;
  const size_t stride = (size_t)(a->stride ? a->stride : a->activation != VX_NONE ? features : w->rows);
  F32x16 bias[2] = {zero(), zero()};
  if (w->bias)
    for (int h = 0; h < 2; ++h) bias[h] = load(w->bias + (size_t)tile * 32 + h * 16);
  for (int32_t t = 0; t < tokens; ++t) {
    F32x16 sums[2] = {load(c + t * 32) + bias[0], load(c + t * 32 + 16) + bias[1]};
    if (a->activation != VX_NONE) {
      const int32_t left = features - tile * 16;
      float* y = a->y + (size_t)(row + t) * stride + tile * 16;
      store_n(y, activate(sums[0], a->activation) * sums[1], left < 16 ? left : 16);
      continue;
    }
    for (int h = 0; h < 2; ++h) {
      const int32_t column = w->gated ? h * features + tile * 16 : tile * 32 + h * 16;
      const int32_t left = (w->gated ? (h + 1) * features : w->rows) - column;
      if (left <= 0) continue;
      if (a->softcap != 0.0f)
        sums[h] = splat(a->softcap) * tanh(sums[h] / splat(a->softcap));
      store_n(a->y + (size_t)(row + t) * stride + column, sums[h], left < 16 ? left : 16);
    }
  }
}

}  // namespace VX_ISA
}  // namespace vx
