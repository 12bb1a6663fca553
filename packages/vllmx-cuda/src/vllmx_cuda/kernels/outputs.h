// What products of few tokens end with: the sums of a block's threads become elements of y.
#pragma once
#include "vx.h"

#ifndef VX_OUT
#define VX_OUT 0
#endif
#if VX_OUT  // 1: f32, as logits are
typedef float out_elem;
#else
typedef elem out_elem;
#endif

// Every thread holds a part of ROWS x TOKENS sums, from (token0, row0) of y (m, n) on, whose rows are
// `pitch` apart. The parts are added in an order that m does not change, and the bias (null: none).
template <int WARPS, int ROWS, int TOKENS>
VX_DEV void store_sums(out_elem* y, const float (&sums)[ROWS][TOKENS],
                       float (&part)[WARPS][ROWS * TOKENS], const float* bias, int token0, int row0,
                       int m, int n, int pitch) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      float sum = warp_sum(sums[r][t]);
      if (lane == 0) part[warp][r * TOKENS + t] = sum;
    }
  __syncthreads();
  int r = threadIdx.x / TOKENS, t = threadIdx.x % TOKENS;
  if (r >= ROWS || row0 + r >= n || token0 + t >= m) return;
  float sum = bias ? bias[row0 + r] : 0.f;
#pragma unroll
  for (int p = 0; p < WARPS; p++) sum += part[p][threadIdx.x];
  y[(size_t)(token0 + t) * pitch + row0 + r] = from_float<out_elem>(sum);
}
