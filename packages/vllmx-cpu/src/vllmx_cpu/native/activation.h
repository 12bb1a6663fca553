// Activation functions on sixteen lanes; the fused linear and the ops of their own share them, so
// that fusing changes no bits.
#pragma once
#include "ops.h"
#include "simd.h"

namespace vx {
namespace VX_ISA {

// Relative error about 2e-7. Near 0 the exponential would cancel: a polynomial takes over.
VX_INLINE F32x16 tanh(F32x16 x) {
  F32x16 magnitude = min(abs(x), splat(10.0f));
  F32x16 square = magnitude * magnitude;
  F32x16 p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  F32x16 small = fma(p * square, magnitude, magnitude);
  F32x16 large = splat(1.0f) - splat(2.0f) / (exp(magnitude + magnitude) + splat(1.0f));
  F32x16 value = copysign(select(magnitude < splat(0.625f), small, large), x);
  return select(x == x, value, x);
}

// The Gaussian tail Q(t) = erfc(t / sqrt 2) / 2 for t >= 0, to a relative error of about 1e-6:
// exp(-t^2 / 2) times a polynomial in u = 3 / (3 + t), fitted to erfcx.
VX_INLINE F32x16 gaussian_tail(F32x16 t) {
  F32x16 u = splat(3.0f) / (splat(3.0f) + t);
  F32x16 p = splat(-0.0274802484f);
  p = fma(p, u, splat(0.153240442f));
  p = fma(p, u, splat(-0.322185397f));
  p = fma(p, u, splat(0.280547798f));
  p = fma(p, u, splat(-0.0993920341f));
  p = fma(p, u, splat(0.141876623f));
  p = fma(p, u, splat(0.105741277f));
  p = fma(p, u, splat(0.134820044f));
  p = fma(p, u, splat(0.132825822f));
  p = fma(p, u, splat(5.6676804e-06f));
  return p * exp(t * t * splat(-0.5f));
}

VX_INLINE F32x16 activate(F32x16 x, int32_t kind) {
  switch (kind) {
    case VX_SILU:
      return x / (splat(1.0f) + exp(-x));
    case VX_GELU: {
      F32x16 tail = gaussian_tail(abs(x));
      return x * select(x > zero(), splat(1.0f) - tail, tail);
    }
    case VX_GELU_TANH: {
      F32x16 inner = splat(0.7978845608f) * fma(splat(0.044715f) * x * x, x, x);
      // 0.5 (1 + tanh z) = 1 / (1 + exp(-2z)): no cancellation for large negative x
      return x / (splat(1.0f) + exp(inner * splat(-2.0f)));
    }
    default: {  // relu, and its square; NaN stays NaN
      const F32x16 v = select(x < zero(), zero(), x);
      return kind == VX_RELU2 ? v * v : v;
    }
  }
}

}  // namespace VX_ISA
}  // namespace vx
