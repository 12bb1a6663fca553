// Activations -> int8 codes with one scale for each 32, for integer dot products.
//
// Layout: x (M, K) of elem; codes (M, K) of i8; scales (M, K / 32, 2): the scale as f32, value =
//         scale * code, and the sums of the first and the last 16 codes, i16 in one word: what a
//         block's minimum is multiplied by. A run that holds what is not finite gets a NaN as its
//         scale, and zeros.
// Grid:   (M, ceil(K / 32 / 8)), a warp 32 values, 256 threads.
// Floor:  bytes of x.
#include "code_scale.h"
#include "vx.h"

#define RUN 32

extern "C" __global__ void __launch_bounds__(256)
quantize_q8(const elem* __restrict__ x, i8* __restrict__ codes, float* __restrict__ scales, int k) {
  int run = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (run >= k / RUN) return;
  size_t at = (size_t)blockIdx.x * k + run * RUN + lane;
  float v = to_float(x[at]);
  CodeScale scale = code_scale(warp_max_bits(magnitude(v)), 127.f);
  int code = __float2int_rn(scale.finite ? v * scale.factor : 0.f), sum = code;
#pragma unroll
  for (int lanes = 8; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(VX_ALL, sum, lanes);
  int last = __shfl_sync(VX_ALL, sum, 16);
  codes[at] = (i8)code;
  if (lane) return;
  float* out = scales + 2 * ((size_t)blockIdx.x * (k / RUN) + run);
  out[0] = scale.scale, out[1] = __int_as_float((sum & 0xffff) | last << 16);
}
VX_EXPORT(quantize_q8)
