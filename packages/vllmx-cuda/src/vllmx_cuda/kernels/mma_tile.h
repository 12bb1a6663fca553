// The loop of products of few tokens with dense rows: a warp has a piece of K.
#pragma once
#include "input_norm.h"
#include "outputs.h"
#include "vx.h"

#ifndef VX_TILES
#define VX_TILES 1
#endif
#ifndef VX_ROWS
#define VX_ROWS 1
#endif
#define WARPS 8
#define COLS 32  // of a unit: one 16-byte load in each of 4 lanes
#define ROWS (8 * VX_ROWS)
#define TOKENS (8 * VX_TILES)
#define IN_FLIGHT (8 / VX_ROWS)
#define RING (WARPS * IN_FLIGHT * VX_ROWS * 32)  // of 16 bytes

// What a lane holds of a unit: 8 neighbours of each of its tokens and rows, those of the latter 32 words apart
VX_DEV void multiply(float (&sums)[2][VX_ROWS][4], const uint4 (&x)[VX_TILES], const uint4* own) {
  uint4 top = x[0], low = make_uint4(0, 0, 0, 0);
  if (VX_TILES == 2) low = x[VX_TILES - 1];
  const u32 first[4] = {top.x, low.x, top.y, low.y}, second[4] = {top.z, low.z, top.w, low.w};
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++) {
    uint4 w = own[32 * r];
    const u32 w_first[2] = {w.x, w.y}, w_second[2] = {w.z, w.w};
    vx_mma(sums[0][r], first, w_first, elem());
    vx_mma(sums[1][r], second, w_second, elem());
  }
}

// Sums of this block's warps, each over its piece of K, of rows of w and tokens that begin at these addresses:
// in `part`, WARPS x TOKENS x (ROWS + PADDING). A lane reads of the ring only what it copied itself, so no barrier
// stands between. scales: those of `norm`, from token0 of m on.
VX_DEV void sum_tile(const elem* (&rows)[VX_ROWS], const elem* (&tokens)[VX_TILES], uint4* ring, float* part,
                     const Norm& norm, float (&scales)[TOKENS], int token0, int m, int k) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  int units = k / COLS, piece = blockIdx.z * WARPS + warp, shift = 31 - __clz(gridDim.z * WARPS);
  int unit = piece * units >> shift, end = (piece + 1) * units >> shift;
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++) rows[r] += unit * COLS + quarter * 8;
#pragma unroll
  for (int t = 0; t < VX_TILES; t++) tokens[t] += unit * COLS + quarter * 8;

  float sums[2][VX_ROWS][4] = {};
  uint4 x[VX_TILES], next[VX_TILES];
  uint4* own = ring + warp * IN_FLIGHT * VX_ROWS * 32 + lane;
  auto copy = [&](int slot, int at) {
#pragma unroll
    for (int r = 0; r < VX_ROWS; r++)
      vx_cp_async16(own + (slot * VX_ROWS + r) * 32, rows[r] + at, 16);
  };
#pragma unroll
  for (int s = 0; s < IN_FLIGHT - 1; s++) {
    if (unit + s < end) copy(s, s * COLS);
    vx_cp_commit();
  }
  vx_wait_for_predecessor();
#pragma unroll
  for (int t = 0; t < VX_TILES; t++)
    if (unit < end) next[t] = *reinterpret_cast<const uint4*>(tokens[t]);
#if VX_NORM
  const float* weights = norm.weight + unit * COLS + quarter * 8;
  float weight[8], scale[VX_TILES];
  norm_scales(scales, norm, token0, m, k);
#pragma unroll
  for (int t = 0; t < VX_TILES; t++) scale[t] = scales[group + 8 * t];
#endif
  for (; unit < end; unit += IN_FLIGHT) {
#pragma unroll
    for (int s = 0; s < IN_FLIGHT; s++) {
      if (unit + s >= end) break;
      if (unit + s + IN_FLIGHT - 1 < end) copy((s + IN_FLIGHT - 1) % IN_FLIGHT, (s + IN_FLIGHT - 1) * COLS);
      vx_cp_commit();
#if VX_NORM
      load(weight, weights + s * COLS);
#endif
#pragma unroll
      for (int t = 0; t < VX_TILES; t++) {
        x[t] = next[t];
        if (unit + s + 1 < end) next[t] = *reinterpret_cast<const uint4*>(tokens[t] + (s + 1) * COLS);
#if VX_NORM
        x[t] = normed(x[t], scale[t], weight);
#endif
      }
      vx_cp_wait<IN_FLIGHT - 1>();
      multiply(sums, x, own + s * VX_ROWS * 32);
    }
#pragma unroll
    for (int r = 0; r < VX_ROWS; r++) rows[r] += IN_FLIGHT * COLS;
#pragma unroll
    for (int t = 0; t < VX_TILES; t++) tokens[t] += IN_FLIGHT * COLS;
#if VX_NORM
    weights += IN_FLIGHT * COLS;
#endif
  }
  vx_cp_wait<0>();  // groups of nothing
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++)
#pragma unroll
    for (int e = 0; e < 2 * VX_TILES; e++)  // the other half: tokens that are not there
      part[(warp * TOKENS + group + 8 * (e / 2)) * (ROWS + PADDING) + 8 * r + 2 * quarter + e % 2] =
          sums[0][r][e] + sums[1][r][e];
}
