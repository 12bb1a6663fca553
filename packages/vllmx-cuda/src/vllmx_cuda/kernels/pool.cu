// pool_mean: y[i] = the mean of rows first[i] to last[i] of x: a text is what its tokens are on average.
//
// Layout: x (T, width), y (L, width) of elem; first, last (L), last included. Sums are f32, in the order of the rows.
// Grid:   (L, ceil(width / (256 * VX_VEC))), 256 threads, VX_VEC neighbours each. IN_FLIGHT rows are read before the
//         first of them is added, so that a text is no chain of loads.
// Floor:  bytes: x once.
#include "vx.h"

#define IN_FLIGHT 4

extern "C" __global__ void __launch_bounds__(256)
pool_mean(const elem* __restrict__ x, const int* __restrict__ first, const int* __restrict__ last,
          elem* __restrict__ y, int width) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC, begin = first[blockIdx.x], end = last[blockIdx.x] + 1;
  if (i >= width) return;
  float sum[VX_VEC] = {};
  for (int row = begin; row < end; row += IN_FLIGHT) {
    float v[IN_FLIGHT][VX_VEC];
#pragma unroll
    for (int n = 0; n < IN_FLIGHT; n++) load(v[n], x + (size_t)min(row + n, end - 1) * width + i);
#pragma unroll
    for (int n = 0; n < IN_FLIGHT; n++)
#pragma unroll
      for (int j = 0; j < VX_VEC; j++) sum[j] += row + n < end ? v[n][j] : 0.f;
  }
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) sum[j] /= end - begin;
  store(y + (size_t)blockIdx.x * width + i, sum);
}
VX_EXPORT(pool_mean)
