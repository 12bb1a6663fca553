// Activation functions by the value of VX_ACT.
#pragma once
#include "vx.h"

#define VX_SILU 0
#define VX_GELU 1
#define VX_GELU_TANH 2
#define VX_RELU 3
#define VX_SIGMOID 4
#define VX_IDENTITY 5
#define VX_TANH 6
#define VX_RELU2 7
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
#elif VX_ACT == VX_RELU
  return fmaxf(x, 0.f);
#elif VX_ACT == VX_SIGMOID
  return 1.f / (1.f + expf(-x));
#elif VX_ACT == VX_IDENTITY
  return x;
#elif VX_ACT == VX_TANH
  return tanhf(x);
#else
  return fmaxf(x, 0.f) * fmaxf(x, 0.f);
#endif
}
