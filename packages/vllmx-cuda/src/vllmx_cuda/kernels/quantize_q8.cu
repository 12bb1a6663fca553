// Activations -> int8 codes with one scale for each 32, for integer dot products.
//
// Layout: x (M, K) of elem; codes (M, K) of i8; scales (M, K / 32) of f32: value = scale * code.
// Grid:   (M, ceil(K / 32 / 8)), a warp 32 values, 256 threads.
// Floor:  bytes of x.
#include "vx.h"

#define RUN 32

extern "C" __global__ void __launch_bounds__(256)
quantize_q8(const elem* __restrict__ x, i8* __restrict__ codes, float* __restrict__ scales, int k) {
  int run = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (run >= k / RUN) return;
  size_t at = (size_t)blockIdx.x * k + run * RUN + lane;
  float v = to_float(x[at]), top = warp_max(fabsf(v));
  codes[at] = (i8)__float2int_rn(top > 0.f ? v * (127.f / top) : 0.f);
  if (lane == 0) scales[(size_t)blockIdx.x * (k / RUN) + run] = top / 127.f;
}
VX_EXPORT(quantize_q8)
