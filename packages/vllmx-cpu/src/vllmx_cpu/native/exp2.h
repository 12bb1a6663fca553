// Two transcendental functions that attention and sampler share; leaner than simd.h's `exp`, because
// their arguments are bounded.
#pragma once
#include "simd.h"

namespace vx {
namespace VX_ISA {

constexpr float kLog2e = 1.44269504088896340736f;

// 2^x for x <= 0, never below 2^-125; relative error under 2e-7 and exactly 1 at 0. NaN stays NaN.
VX_INLINE F32x16 exp2_nonpositive(F32x16 x) {
  x = max(splat(-125.0f), x);  // in this order NaN stays NaN
  I32x16 n = to_i32(x);
  F32x16 r = x - to_f32(n);
  F32x16 p = splat(1.5403530e-4f);
  p = fma(p, r, splat(1.3333558e-3f));
  p = fma(p, r, splat(9.6181291e-3f));
  p = fma(p, r, splat(5.5504109e-2f));
  p = fma(p, r, splat(2.4022651e-1f));
  p = fma(p, r, splat(6.9314718e-1f));
  p = fma(p, r, splat(1.0f));
  return as_f32(as_i32(p) + (n << 23));
}

// ln x of a positive normal x; relative error under 2e-7, near 1 too (Cephes' logf).
VX_INLINE F32x16 log_positive(F32x16 x) {
  const float half_root = 0.70710678118654752440f;
  U32x16 bits = as_u32(x);
  F32x16 exponent = to_f32(as_i32((bits >> 23) & splat_u32(0xff)) - splat_i32(126));
  F32x16 m = as_f32((bits & splat_u32(0x007fffff)) | splat_u32(0x3f000000));  // [0.5, 1)
  I32x16 low = m < splat(half_root);
  exponent = select(low, exponent - splat(1.0f), exponent);
  F32x16 f = select(low, m + m, m) - splat(1.0f);
  F32x16 square = f * f;
  F32x16 p = splat(7.0376836292e-2f);
  p = fma(p, f, splat(-1.1514610310e-1f));
  p = fma(p, f, splat(1.1676998740e-1f));
  p = fma(p, f, splat(-1.2420140846e-1f));
  p = fma(p, f, splat(1.4249322787e-1f));
  p = fma(p, f, splat(-1.6668057665e-1f));
  p = fma(p, f, splat(2.0000714765e-1f));
  p = fma(p, f, splat(-2.4999993993e-1f));
  p = fma(p, f, splat(3.3333331174e-1f));
  F32x16 y = p * f * square;
  y = fma(exponent, splat(-2.12194440e-4f), y);
  y = fma(square, splat(-0.5f), y);
  return fma(exponent, splat(0.693359375f), f + y);
}

}  // namespace VX_ISA
}  // namespace vx
