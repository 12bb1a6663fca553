// clip: y = x between two numbers, at some of the features of y; NaN stays NaN.
//
// Layout: x (T, width), y (T, pitch) of elem, from the first feature on; bounds of f32: lowest, highest.
// Grid:   (T, ceil(width / (256 * VX_VEC))), 256 threads, VX_VEC neighbours each.
// Floor:  bytes: x read once, y written once.
#include "vx.h"

extern "C" __global__ void __launch_bounds__(256)
clip(const elem* __restrict__ x, const float* __restrict__ bounds, elem* __restrict__ y, int width, int pitch) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  float v[VX_VEC], low = bounds[0], high = bounds[1];
  load(v, x + (size_t)blockIdx.x * width + i);
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) {
    v[j] = v[j] < low ? low : v[j];
    v[j] = v[j] > high ? high : v[j];
  }
  store(y + (size_t)blockIdx.x * pitch + i, v);
}
VX_EXPORT(clip)
