// Activations -> codes of 8 bits with one scale for each row, or for each 128 columns of a row, for products of
// codes.
//
// Layout: x (M, K) of elem; codes (M, K); scales (M) of f32, with VX_GROUPS 1 (ceil(K / 128), pitch). What holds
//         something that is not finite gets a NaN as its scale, and zeros. `fixed`, where it is not 0: the
//         scale of all rows (FP8). VX_GROUPS 1 wants VX_VEC 8 or 4.
// Grid:   (M), whole warps that share one row.
// Floor:  bytes of x; the second pass comes from L1.
#include "codes8.h"
#include "vx.h"

extern "C" __global__ void __launch_bounds__(1024)
quantize_rows(const elem* __restrict__ x, u8* __restrict__ codes, float* __restrict__ scales,
              int width, float fixed, int pitch) {
  const elem* row = x + (size_t)blockIdx.x * width;
  code* out = reinterpret_cast<code*>(codes) + (size_t)blockIdx.x * width;
#if VX_GROUPS
  for (int i = threadIdx.x * VX_VEC; i - (int)threadIdx.x * VX_VEC < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC] = {};
    if (i < width) load(v, row + i);
    store_groups(out, scales + blockIdx.x, v, i, width, pitch);
  }
#else
  __shared__ u32 part[32];
  u32 top = 0;
  for (int i = threadIdx.x * VX_VEC; i < width && fixed == 0.f; i += blockDim.x * VX_VEC) {
    float v[VX_VEC];
    load(v, row + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) top = max(top, magnitude(v[j]));
  }
  CodeScale scale = fixed == 0.f ? code_scale(block_max(top, part), CODE_LIMIT) : fixed_scale(fixed);
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC];
    load(v, row + i);
    store_codes(out + i, v, scale);
  }
  if (threadIdx.x == 0) scales[blockIdx.x] = scale.scale;
#endif
}
VX_EXPORT(quantize_rows)
