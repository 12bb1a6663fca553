// codes8_dequantize: rows of codes -> elem, for products with many tokens.
// codes8_gemv:       y = x w^T + bias for a few tokens; the activations stay as they are.
// codes8_rescale:    sums of products of codes -> y.
//
// Layout: w (N, K) of codes, K a multiple of 16; scales (ceil(N / block_rows), scales_pitch) of f32, block_cols a multiple of 16 or K; x (M, K), bias (N) of f32 or null; y (M, pitch),
//         its first N columns, of elem, or of f32 with VX_OUT 1. codes8_dequantize: w begins at row
//         `first` of the scales. codes8_rescale: sums (M, N) of f32 for FP8, i32 for int8, x_scales
//         (M), w_scales (N).
// Grid:   codes8_dequantize (rows, ceil(K / 16 / 256)), 256 threads, 16 codes each.
//         codes8_gemv (ceil(N / ROWS), ceil(M / VX_TOKENS)), 128 threads that share ROWS rows of w and
//         split K by 16 codes, which are made floats once for all tokens.
//         codes8_rescale (M, ceil(N / 256)), 256 threads.
// Floor:  bytes: w once for each tile of VX_TOKENS tokens; what is dequantised once in, once out.
#include "codes8.h"
#include "outputs.h"
#include "vx.h"

#ifndef VX_TOKENS
#define VX_TOKENS 1
#endif
#define THREADS 128
#define WARPS 4
#define ROWS (VX_TOKENS == 1 ? 4 : 2)
#define STEP 16

VX_DEV void to_floats(float (&v)[STEP], const uint4& raw) {
  const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float4 four = four_floats(words[i]);
    v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
  }
}

extern "C" __global__ void __launch_bounds__(256)
codes8_dequantize(const u8* __restrict__ w, const float* __restrict__ scales, elem* __restrict__ y,
                  int k, int first, int block_rows, int block_cols) {
  int i = (blockIdx.y * 256 + threadIdx.x) * STEP;
  if (i >= k) return;
  size_t at = (size_t)blockIdx.x * k + i;
  int pitch = scales_pitch((k + block_cols - 1) / block_cols, block_rows);
  float scale = scales[(size_t)((first + blockIdx.x) / block_rows) * pitch + i / block_cols];
  float v[STEP];
  to_floats(v, *reinterpret_cast<const uint4*>(w + at));
#pragma unroll
  for (int part = 0; part < STEP / 8; part++) {
    float some[8];
#pragma unroll
    for (int j = 0; j < 8; j++) some[j] = __fmul_rn(v[8 * part + j], scale);
    store(y + at + 8 * part, some);
  }
}
VX_EXPORT(codes8_dequantize)

extern "C" __global__ void __launch_bounds__(THREADS)
codes8_gemv(const elem* __restrict__ x, const u8* __restrict__ w, const float* __restrict__ scales,
            const float* __restrict__ bias, out_elem* __restrict__ y, int m, int n, int k, int pitch,
            int block_rows, int block_cols) {
  __shared__ float part[WARPS][ROWS * VX_TOKENS];
  int row0 = blockIdx.x * ROWS, token0 = blockIdx.y * VX_TOKENS;
  int groups = scales_pitch((k + block_cols - 1) / block_cols, block_rows);
  float sums[ROWS][VX_TOKENS] = {};
  for (int i = threadIdx.x * STEP; i < k; i += THREADS * STEP) {
    uint4 raw[ROWS];
    float scale[ROWS], v[VX_TOKENS][STEP];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      int row = min(row0 + r, n - 1);
      raw[r] = vx_load_once(w + (size_t)row * k + i);
      scale[r] = scales[(size_t)(row / block_rows) * groups + i / block_cols];
    }
#pragma unroll
    for (int t = 0; t < VX_TOKENS; t++) load(v[t], x + (size_t)min(token0 + t, m - 1) * k + i);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float codes[STEP];
      to_floats(codes, raw[r]);
#pragma unroll
      for (int t = 0; t < VX_TOKENS; t++) {
        float dot = 0.f;
#pragma unroll
        for (int j = 0; j < STEP; j++) dot += codes[j] * v[t][j];
        sums[r][t] += scale[r] * dot;
      }
    }
  }
  store_sums<WARPS>(y, sums, part, bias, token0, row0, m, n, pitch);
}
VX_EXPORT(codes8_gemv)

extern "C" __global__ void __launch_bounds__(256)
codes8_rescale(const code_sum* __restrict__ sums, const float* __restrict__ x_scales,
               const float* __restrict__ w_scales, const float* __restrict__ bias,
               out_elem* __restrict__ y, int n, int pitch) {
  int i = blockIdx.y * 256 + threadIdx.x;
  if (i >= n) return;
  float sum = (float)sums[(size_t)blockIdx.x * n + i] * x_scales[blockIdx.x] * w_scales[i];
  y[(size_t)blockIdx.x * pitch + i] = from_float<out_elem>(bias ? sum + bias[i] : sum);
}
VX_EXPORT(codes8_rescale)
