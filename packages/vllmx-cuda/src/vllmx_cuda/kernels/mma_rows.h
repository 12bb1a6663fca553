// A tile of linear_mma.cu and of experts_mma.cu.
#pragma once
#include "expert_tiles.h"
#include "mma_tile.h"

// One tile of tokens: token i of m reads x from `row_of(i)` on, and writes row `token0 + i` of y.
template <class Rows>
VX_DEV void multiply_tile(const elem* __restrict__ x, Rows row_of, const elem* __restrict__ w,
                          const float* __restrict__ bias, out_elem* __restrict__ y,
                          float* partial, u32* arrivals, uint4* ring, float* part, int* arrived, int token0, int m,
                          int n, int k, int pitch) {
  int group = threadIdx.x % 32 / 4, row0 = blockIdx.x * ROWS;
  const elem *rows[VX_ROWS], *tokens[VX_TILES];
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++) rows[r] = w + (size_t)min(row0 + 8 * r + group, n - 1) * k;
#pragma unroll
  for (int t = 0; t < VX_TILES; t++) tokens[t] = x + row_of(min(token0 + 8 * t + group, m - 1));
  sum_tile(rows, tokens, ring, part, k);
  store_parts<WARPS, ROWS, TOKENS>(y, part, bias, partial, arrivals, arrived, token0, row0, m, n, pitch);
}
