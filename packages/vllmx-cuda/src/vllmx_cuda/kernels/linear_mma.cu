// y = x w^T + bias for up to 16 tokens at a time, on tensor cores; the weights are read once.
//
// Layout: x (M, K), w (N, K) of elem, bf16 or f16; bias (N) of f32 or null; y (M, N) of elem, or of
//         f32 with VX_OUT 1. K is a multiple of 32. Sums in f32.
// Grid:   (ceil(N / 16), ceil(M / (8 * VX_TILES))), 256 threads: 16 rows of w against 8 * VX_TILES
//         tokens, the warps split K. Weights go from memory straight into the fragments: the order
//         of K inside a product is free as long as both sides agree, so a lane takes 8 neighbours
//         with one 16-byte load and feeds two products, values 0-3 the first, 4-7 the second.
// Floor:  bytes of w, once for each tile of tokens.
#include "outputs.h"
#include "vx.h"

#ifndef VX_TILES
#define VX_TILES 1
#endif
#define WARPS 8
#define IN_FLIGHT 4
#define PIECE 32  // of K, one 16-byte load in each of 4 lanes

extern "C" __global__ void __launch_bounds__(32 * WARPS)
linear_mma(const elem* __restrict__ x, const elem* __restrict__ w, const float* __restrict__ bias,
           out_elem* __restrict__ y, int m, int n, int k) {
  __shared__ float part[WARPS][16][8 * VX_TILES];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  int row0 = blockIdx.x * 16, token0 = blockIdx.y * 8 * VX_TILES;
  const elem *rows[2], *tokens[VX_TILES];
#pragma unroll
  for (int r = 0; r < 2; r++)
    rows[r] = w + (size_t)min(row0 + group + 8 * r, n - 1) * k + quarter * 8;
#pragma unroll
  for (int t = 0; t < VX_TILES; t++)
    tokens[t] = x + (size_t)min(token0 + group + 8 * t, m - 1) * k + quarter * 8;

  float sums[VX_TILES][4] = {};
  for (int i = warp * PIECE * IN_FLIGHT; i < k; i += WARPS * PIECE * IN_FLIGHT) {
    uint4 a[IN_FLIGHT][2];
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; u++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        a[u][r] = i + u * PIECE < k ? vx_load_once(rows[r] + i + u * PIECE) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; u++) {
      int at = i + u * PIECE < k ? i + u * PIECE : 0;
      u32 first[4] = {a[u][0].x, a[u][1].x, a[u][0].y, a[u][1].y};
      u32 second[4] = {a[u][0].z, a[u][1].z, a[u][0].w, a[u][1].w};
#pragma unroll
      for (int t = 0; t < VX_TILES; t++) {
        uint4 b = *reinterpret_cast<const uint4*>(tokens[t] + at);
        u32 b_first[2] = {b.x, b.y}, b_second[2] = {b.z, b.w};
        vx_mma(sums[t], first, b_first, elem());
        vx_mma(sums[t], second, b_second, elem());
      }
    }
  }
#pragma unroll
  for (int t = 0; t < VX_TILES; t++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      part[warp][group + 8 * (e / 2)][8 * t + 2 * quarter + e % 2] = sums[t][e];
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * 8 * VX_TILES; i += 32 * WARPS) {
    int row = i % 16, token = i / 16;
    if (row0 + row >= n || token0 + token >= m) continue;
    float sum = bias ? bias[row0 + row] : 0.f;
#pragma unroll
    for (int p = 0; p < WARPS; p++) sum += part[p][row][token];
    y[(size_t)(token0 + token) * n + row0 + row] = from_float<out_elem>(sum);
  }
}
VX_EXPORT(linear_mma)
