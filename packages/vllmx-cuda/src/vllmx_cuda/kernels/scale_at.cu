// scale_at: y = x, its first `features` times the entry of a table at the token's position.
//
// Layout: x, y (T, F) of elem, table (positions) of f32, positions (T). VX_VEC divides `features`, so that the features
//         of a thread share their factor.
// Grid:   (T, ceil(F / (256 * VX_VEC))), 256 threads, VX_VEC neighbours each.
// Floor:  bytes: x read once, y written once; an entry of the table for each token.
#include "vx.h"

extern "C" __global__ void __launch_bounds__(256)
scale_at(const elem* __restrict__ x, const float* __restrict__ table, const int* __restrict__ positions,
         elem* __restrict__ y, int width, int features) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  float v[VX_VEC], factor = i < features ? table[positions[blockIdx.x]] : 1.f;
  load(v, x + (size_t)blockIdx.x * width + i);
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) v[j] *= factor;
  store(y + (size_t)blockIdx.x * width + i, v);
}
VX_EXPORT(scale_at)
