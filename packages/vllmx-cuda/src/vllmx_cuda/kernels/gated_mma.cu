// y = act(x gate^T + bias) * (x up^T + bias) for up to 16 tokens: the product of linear_mma and gated_act in one, to
// the same bits.
//
// Layout: as linear_mma; w (2F, K), the rows of the gate first; bias (2F) or null; y (M, F).
// Grid:   (ceil(F / 8), ceil(M / (8 * VX_TILES))), 256 threads. A block has 8 rows of the gate and the same of up.
// Floor:  bytes of w, once for each tile of tokens.
#include "activation.h"
#define VX_ROWS 2
#include "mma_tile.h"

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
gated_mma(const elem* __restrict__ x, const elem* __restrict__ w, const float* __restrict__ bias,
          elem* __restrict__ y, int m, int width, int k) {
  __shared__ uint4 ring[RING];
  __shared__ float part[WARPS * TOKENS * (ROWS + PADDING)];
  int group = threadIdx.x % 32 / 4, row0 = blockIdx.x * 8, token0 = blockIdx.y * TOKENS;
  const elem *gate = w + (size_t)min(row0 + group, width - 1) * k, *tokens[VX_TILES];
  const elem* rows[2] = {gate, gate + (size_t)width * k};
#pragma unroll
  for (int t = 0; t < VX_TILES; t++) tokens[t] = x + (size_t)min(token0 + 8 * t + group, m - 1) * k;
  sum_tile(rows, tokens, ring, part, k);
  __syncthreads();
  int row = threadIdx.x % 8, token = threadIdx.x / 8;
  if (token >= TOKENS || row0 + row >= width || token0 + token >= m) return;
  float sums[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    constexpr int stride = ROWS + PADDING;
    float sum = add_tree<WARPS>(part + token * stride + 8 * half + row, TOKENS * stride);
    if (bias) sum += bias[half * width + row0 + row];
    sums[half] = to_float(from_float<elem>(sum));  // as it would be stored
  }
  y[(size_t)(token0 + token) * width + row0 + row] = from_float<elem>(activated(sums[0]) * sums[1]);
}
VX_EXPORT(gated_mma)
