// The product of linear_mma.cu with the matrix of one of X experts for each tile (expert_tiles.h).
// Grid: (ceil(N / (8 * VX_ROWS)), tiles).
#include "mma_rows.h"

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
experts_mma(const elem* __restrict__ x, const elem* __restrict__ w, const float* __restrict__ bias,
            const int* __restrict__ order, const int* __restrict__ tiles, out_elem* __restrict__ y, int share,
            int n, int k) {
  __shared__ uint4 ring[RING];
  __shared__ float part[WARPS * TOKENS * (ROWS + PADDING)];
  __shared__ float scales[TOKENS];
  ExpertTile tile = tile_of(tiles, blockIdx.y);
  if (tile.count == 0) return;
  multiply_tile(x, RowOfSlot{order, tile.first, share, k}, w + (size_t)tile.expert * n * k,
                bias ? bias + (size_t)tile.expert * n : nullptr, y + (size_t)tile.first * n, nullptr, nullptr,
                {}, {}, ring, part, scales, nullptr, 0, tile.count, n, k, n);
}
VX_EXPORT(experts_mma)
