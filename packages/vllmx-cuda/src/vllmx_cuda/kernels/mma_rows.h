// A tile of linear_mma.cu and of experts_mma.cu.
#pragma once
#include "expert_tiles.h"
#include "mma_tile.h"

// One tile of tokens: token i of m reads x from `row_of(i)` on, and writes row `token0 + i` of y.
template <class Rows>
VX_DEV void multiply_tile(const elem* x, Rows row_of, const elem* __restrict__ w, const float* __restrict__ bias,
                          out_elem* y, float* partial, u32* arrivals, const Added& added, const Norm& norm,
                          uint4* ring, float* part, float (&scales)[TOKENS], int* arrived, int token0, int m, int n,
                          int k, int pitch) {
  int group = threadIdx.x % 32 / 4, row0 = blockIdx.x * (VX_GATED ? 8 : ROWS);
  const elem *rows[VX_ROWS], *tokens[VX_TILES];
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++) {
    int row = VX_GATED ? min(row0 + group, n - 1) + r * n : min(row0 + 8 * r + group, n - 1);
    rows[r] = w + (size_t)row * k;
  }
#pragma unroll
  for (int t = 0; t < VX_TILES; t++) tokens[t] = x + row_of(min(token0 + 8 * t + group, m - 1));
  sum_tile(rows, tokens, ring, part, norm, scales, token0, m, k);
  store_parts<WARPS, ROWS, TOKENS>(y, part, bias, partial, arrivals, arrived, added, token0, row0, m, n, pitch);
}
