// softplus on sixteen lanes.
#pragma once
#include "exp2.h"

namespace vx {
namespace VX_ISA {

// ln(1 + exp x), to a relative error of about 3e-7; NaN stays NaN.
VX_INLINE F32x16 softplus(F32x16 x) {
  const F32x16 y = exp(-abs(x)), one = splat(1.0f), whole = one + y;
  const F32x16 rest = select(whole == one, y, log_positive(whole) * y / (whole - one));
  return select(x > zero(), x, zero()) + select(x == x, rest, x);
}

}  // namespace VX_ISA
}  // namespace vx
