// scale_by: y = x * w, a value of w for each `span` neighbouring features.
//
// Layout: x, y (T, F) of elem, w (F / span) of f32. With a span above 1, VX_VEC divides it, so that the features of
//         a thread share their value.
// Grid:   (T, ceil(F / (256 * VX_VEC))), 256 threads, VX_VEC neighbours each.
// Floor:  bytes: x read once, y written once; w stays in the cache.
#include "vx.h"

extern "C" __global__ void __launch_bounds__(256)
scale_by(const elem* __restrict__ x, const float* __restrict__ w, elem* __restrict__ y, int width, int span) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  float v[VX_VEC], factor[VX_VEC];
  load(v, x + (size_t)blockIdx.x * width + i);
  if (span == 1) {
    load(factor, w + i);
  } else {
    float shared = w[i / span];
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) factor[j] = shared;
  }
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) v[j] *= factor[j];
  store(y + (size_t)blockIdx.x * width + i, v);
}
VX_EXPORT(scale_by)
