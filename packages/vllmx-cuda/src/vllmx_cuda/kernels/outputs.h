// What products of few tokens end with: the sums of a block's threads become elements of y.
#pragma once
#include "vx.h"

#ifndef VX_GATED  // 1 + VX_ACT: the first half of a block's rows are gates of the second half
#define VX_GATED 0
#endif
#if VX_GATED
#define VX_ACT (VX_GATED - 1)
#include "activation.h"
#endif
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

// Of one output of the block: the sums of WARPS warps, `stride` apart
template <int WARPS> VX_DEV float add_tree(const float* part, int stride) {
  float v[WARPS];
#pragma unroll
  for (int p = 0; p < WARPS; p++) v[p] = part[p * stride];
#pragma unroll
  for (int step = 1; step < WARPS; step *= 2)
#pragma unroll
    for (int p = 0; p < WARPS; p += 2 * step) v[p] += v[p + step];
  return v[0];
}

// Whether this block is the last of `count` to come here; then its threads may read what the other blocks wrote
// before they came. One thread announces what all threads of the block wrote: the barrier orders their writes
// before its fence, the fence before the counter; on the way back the other fence and barrier do the same.
// counter: 0 before, and after the last; arrived: one word of shared memory.
VX_DEV bool arrives_last(u32* counter, int count, int* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *arrived = (int)atomicInc(counter, count - 1);
    __threadfence();
  }
  __syncthreads();
  return *arrived + 1 == count;
}

// What the outputs are added to, a residual (M, N) or null, which may lie where y does; and where the sums of
// the squares of each 16 outputs go (of 8 where a block has no more), for the norm behind (input_norm.h):
// (M, ceil(N / 16)) or null. A block of 32 leaves two, so that the order of sums does not depend on VX_ROWS.
struct Added {
  const elem* residual;
  float* squares;
};

// Stores an output of each thread of a warp, which are ROWS neighbours of a token; `inside`: it is one of y's.
template <int ROWS>
VX_DEV void store_output(out_elem* y, float sum, const float* bias, const Added& added, int token, int row,
                         bool inside, int n, int pitch) {
  constexpr int run = ROWS < 16 ? ROWS : 16;
  float square = 0.f;
  if (inside) {
    size_t at = (size_t)token * pitch + row;
    if (bias) sum += bias[row];
    // rounded twice, as by two launches
    if (added.residual) sum = to_float(from_float<elem>(sum)) + to_float(added.residual[at]);
    out_elem stored = from_float<out_elem>(sum);
    y[at] = stored, square = to_float(stored) * to_float(stored);
  }
  if (!added.squares) return;
#pragma unroll
  for (int lanes = run / 2; lanes > 0; lanes >>= 1) square += __shfl_xor_sync(VX_ALL, square, lanes);
  if (inside && threadIdx.x % run == 0) added.squares[(size_t)token * ((n + run - 1) / run) + row / run] = square;
}

#define PADDING 4  // writes of a warp hit all banks
#if VX_GATED
// y = act(gate) * up, to the bits of a product and gated_act: rows 0 .. ROWS / 2 of a block are gates from row0 of n
// on, the others the rows n behind them; bias (2 n).
template <int WARPS, int ROWS, int TOKENS>
VX_DEV void store_gated(out_elem* y, const float* part, const float* bias, int token0, int row0, int m, int n,
                        int pitch) {
  constexpr int stride = ROWS + PADDING, half = ROWS / 2;
  __syncthreads();
  for (int i = threadIdx.x; i < half * TOKENS; i += 32 * WARPS) {
    int row = i % half, token = i / half;
    if (row0 + row >= n || token0 + token >= m) continue;
    float sums[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = add_tree<WARPS>(part + token * stride + h * half + row, TOKENS * stride);
      if (bias) sum += bias[h * n + row0 + row];
      sums[h] = to_float(from_float<elem>(sum));  // as it would be stored
    }
    y[(size_t)(token0 + token) * pitch + row0 + row] = from_float<out_elem>(activated(sums[0]) * sums[1]);
  }
}
#endif

// The sums of a block's warps, WARPS x TOKENS x (ROWS + PADDING) of shared memory, become elements of y from
// (token0, row0) on; so do those of gridDim.z blocks. All are added in an order that neither m nor the grid
// changes: of a block in a tree, then the last block of an output to arrive adds the blocks', out of `partial`
// (gridDim.z, m, n). arrivals: one u32 for each (x, y) of the grid, 0 before and after; both are null with one
// block. With VX_GATED: see store_gated.
template <int WARPS, int ROWS, int TOKENS>
VX_DEV void store_parts(out_elem* y, const float* part, const float* bias, float* partial, u32* arrivals,
                        int* arrived, const Added& added, int token0, int row0, int m, int n, int pitch) {
#if VX_GATED
  return store_gated<WARPS, ROWS, TOKENS>(y, part, bias, token0, row0, m, n, pitch);
#endif
  constexpr int stride = ROWS + PADDING;
  int splits = gridDim.z;
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * TOKENS; i += 32 * WARPS) {
    int row = i % ROWS, token = i / ROWS;
    bool inside = row0 + row < n && token0 + token < m;
    float sum = add_tree<WARPS>(part + token * stride + row, TOKENS * stride);
    if (splits == 1) {
      store_output<ROWS>(y, sum, bias, added, token0 + token, row0 + row, inside, n, pitch);
    } else if (inside) {
      partial[((size_t)blockIdx.z * m + token0 + token) * n + row0 + row] = sum;
    }
  }
  if (splits == 1) return;
  if (!arrives_last(arrivals + blockIdx.y * gridDim.x + blockIdx.x, splits, arrived)) return;
  for (int i = threadIdx.x; i < ROWS * TOKENS; i += 32 * WARPS) {
    int row = i % ROWS, token = i / ROWS;
    bool inside = row0 + row < n && token0 + token < m;
    const float* parts = partial + (size_t)(token0 + token) * n + row0 + row;
    float sum = inside ? parts[0] : 0.f;
    for (int s = 1; inside && s < splits; s++) sum += parts[(size_t)s * m * n];
    store_output<ROWS>(y, sum, bias, added, token0 + token, row0 + row, inside, n, pitch);
  }
}

// Every warp holds fragments D of the same ROW_TILES x TOKEN_TILES tiles of 16 rows and 8 tokens, over its part
// of K. part: as store_parts wants it, of memory that nobody uses any more.
template <int WARPS, int ROW_TILES, int TOKEN_TILES>
VX_DEV void store_fragments(out_elem* y, const float (&sums)[ROW_TILES][TOKEN_TILES][4], float* part,
                            const float* bias, float* partial, u32* arrivals, int* arrived, const Added& added,
                            int token0, int row0, int m, int n, int pitch) {
  constexpr int rows = 16 * ROW_TILES, tokens = 8 * TOKEN_TILES;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; t++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        part[(warp * tokens + 8 * t + 2 * (lane % 4) + e % 2) * (rows + PADDING) + 16 * r + lane / 4 + 8 * (e / 2)] =
            sums[r][t][e];
  store_parts<WARPS, rows, tokens>(y, part, bias, partial, arrivals, arrived, added, token0, row0, m, n, pitch);
}
