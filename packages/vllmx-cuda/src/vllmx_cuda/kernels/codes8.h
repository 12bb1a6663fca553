// Weights and activations as codes of 8 bits, int8 or FP8 e4m3: value = scale * code.
#pragma once
#include "code_scale.h"
#include "vx.h"

#define VX_INT8 0
#define VX_E4M3 1
#ifndef VX_CODE
#define VX_CODE VX_E4M3
#endif
#ifndef VX_GROUPS  // 1: activations have a scale for each GROUP columns, not one a row
#define VX_GROUPS 0
#endif
#define GROUP 128

#if VX_CODE == VX_E4M3
typedef __nv_fp8_e4m3 code;
typedef float code_sum;  // what the tensor cores add products of codes up in
#define CODE_LIMIT 448.f
#else
typedef i8 code;
typedef int code_sum;
#define CODE_LIMIT 127.f
#endif

VX_DEV code to_code(float v) {
#if VX_CODE == VX_E4M3
  return __nv_fp8_e4m3(v * 0.f + v);  // nearest, ties to even, 448 at most; an infinity becomes NaN
#else
  return (i8)__float2int_rn(v);
#endif
}

// Four codes of a word
VX_DEV float4 four_floats(u32 word) {
#if VX_CODE == VX_E4M3
  __nv_fp8x4_e4m3 four;
  four.__x = word;
  return static_cast<float4>(four);
#else
  return make_float4((i8)word, (i8)(word >> 8), (i8)(word >> 16), (i8)(word >> 24));
#endif
}

template <int N> VX_DEV void store_codes(code* p, const float (&v)[N], const CodeScale& scale) {
  Pack<code, N> pack;
#pragma unroll
  for (int i = 0; i < N; i++) pack.at[i] = to_code(scale.finite ? v[i] * scale.factor : 0.f);
  store_pack(p, pack);
}

// Codes of what neighbouring lanes hold of a row, from column `at` on, with a scale for each GROUP columns. All lanes
// of a warp come here, those beyond the row with zeros. scales: of this row, groups `pitch` apart.
VX_DEV void store_groups(code* row, float* scales, const float (&v)[VX_VEC], int at, int width, int pitch) {
  u32 top = 0;
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) top = max(top, magnitude(v[j]));
#pragma unroll
  for (int lanes = GROUP / VX_VEC / 2; lanes > 0; lanes >>= 1)
    top = max(top, __shfl_xor_sync(VX_ALL, top, lanes));
  if (at >= width) return;
  CodeScale scale = code_scale(top, CODE_LIMIT);
  store_codes(row + at, v, scale);
  if (at % GROUP == 0) scales[(size_t)(at / GROUP) * pitch] = scale.scale;
}

// Of rows whose scale is fixed beforehand: what lies beyond gets the greatest code. Of FP8 alone, whose
// codes tell what is not finite.
VX_DEV CodeScale fixed_scale(float scale) { return {__fdiv_rn(1.f, scale), scale, true}; }

// The greatest over a block of whole warps; every thread gets it. part: 32 words of shared memory.
VX_DEV u32 block_max(u32 v, u32* part) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  v = warp_max_bits(v);
  __syncthreads();  // an earlier use of part may still be read
  if (lane == 0) part[warp] = v;
  __syncthreads();
  return warp_max_bits(lane < warps ? part[lane] : 0);
}
