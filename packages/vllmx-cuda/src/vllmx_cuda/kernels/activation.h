// Activation functions by the value of VX_ACT.
#pragma once
#include "vx.h"

#define VX_SILU 0
#define VX_GELU 1
#define VX_GELU_TANH 2
#define VX_RELU 3
#ifndef VX_ACT
#define VX_ACT VX_SILU
#endif

VX_DEV float activated(float x) {
#if VX_ACT == VX_SILU
  return x / (1.f + expf(-x));
#elif VX_ACT == VX_GELU
  return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
#elif VX_ACT == VX_GELU_TANH
  return 0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
#else
  return fmaxf(x, 0.f);
#endif
}
