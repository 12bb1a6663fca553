// y = x w^T + bias for a few tokens, on the ordinary cores: any K, any dtype. For what
// linear_mma does not take.
//
// Layout: x (M, K), w (N, K) of elem; bias (N) of f32 or null; y (M, N) of elem, or of f32 with
//         VX_OUT 1; its rows are `pitch` apart. K is a multiple of VX_VEC. Sums in f32, in an order that M
//         does not change.
// Grid:   (ceil(N / ROWS), ceil(M / VX_TOKENS)), 128 threads that share ROWS rows of w and split K;
//         a thread keeps several 16-byte loads of w in flight and reuses x for all of them.
// Floor:  bytes of w, once for each tile of VX_TOKENS tokens.
#include "expert_tiles.h"
#include "outputs.h"
#include "vx.h"

#ifndef VX_TOKENS
#define VX_TOKENS 1
#endif
#define THREADS 128
#define WARPS 4
#define ROWS 4
#define IN_FLIGHT 2  // pieces of K: IN_FLIGHT * ROWS loads under way in each thread

VX_DEV Pack<elem, VX_VEC> load_weight(const elem* p) {
  Pack<elem, VX_VEC> pack;
  if (sizeof pack == 16) {
    *reinterpret_cast<uint4*>(&pack) = vx_load_once(p);
  } else {
    pack = load_pack<elem, VX_VEC>(p);
  }
  return pack;
}

#define BLOCKS(SHARED) (VX_TOKENS < 4 ? 8 : VX_TOKENS < 8 ? SHARED : 3)  // that their registers leave room for

// One tile of tokens: token i of m reads x from `row_of(i)` on, and writes row i of y.
template <class Rows>
VX_DEV void multiply_tile(const elem* __restrict__ x, Rows row_of, const elem* __restrict__ w,
                          const float* __restrict__ bias, out_elem* __restrict__ y,
                          float (&part)[WARPS][ROWS * VX_TOKENS], int token0, int m, int n, int k, int pitch) {
  int row0 = blockIdx.x * ROWS;
  const elem *rows[ROWS], *tokens[VX_TOKENS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) rows[r] = w + (size_t)min(row0 + r, n - 1) * k;
#pragma unroll
  for (int t = 0; t < VX_TOKENS; t++) tokens[t] = x + row_of(min(token0 + t, m - 1));

  const int step = THREADS * VX_VEC;
  float sums[ROWS][VX_TOKENS] = {};
  for (int i = threadIdx.x * VX_VEC; i < k; i += step * IN_FLIGHT) {
    Pack<elem, VX_VEC> raw[IN_FLIGHT][ROWS];
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; u++)
#pragma unroll
      for (int r = 0; r < ROWS; r++)  // a piece beyond the end is loaded from the start, not used
        raw[u][r] = load_weight(rows[r] + (i + u * step < k ? i + u * step : 0));
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; u++) {
      if (i + u * step >= k) break;
#pragma unroll
      for (int t = 0; t < VX_TOKENS; t++) {
        float v[VX_VEC];
        load(v, tokens[t] + i + u * step);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int j = 0; j < VX_VEC; j++) sums[r][t] += to_float(raw[u][r].at[j]) * v[j];
      }
    }
  }
  store_sums<WARPS>(y, sums, part, bias, token0, row0, m, n, pitch);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS(5))
linear_gemv(const elem* __restrict__ x, const elem* __restrict__ w, const float* __restrict__ bias,
            out_elem* __restrict__ y, int m, int n, int k, int pitch) {
  __shared__ float part[WARPS][ROWS * VX_TOKENS];
  multiply_tile(x, OwnRow{k}, w, bias, y, part, blockIdx.y * VX_TOKENS, m, n, k, pitch);
}
VX_EXPORT(linear_gemv)

// The same with the matrix of one of X experts for each tile (expert_tiles.h).
// Grid: (ceil(N / ROWS), tiles).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS(4))
experts_gemv(const elem* __restrict__ x, const elem* __restrict__ w, const float* __restrict__ bias,
             const int* __restrict__ order, const int* __restrict__ tiles, out_elem* __restrict__ y, int share,
             int n, int k) {
  __shared__ float part[WARPS][ROWS * VX_TOKENS];
  ExpertTile tile = tile_of(tiles, blockIdx.y);
  if (tile.count == 0) return;
  multiply_tile(x, RowOfSlot{order, tile.first, share, k}, w + (size_t)tile.expert * n * k,
                bias ? bias + (size_t)tile.expert * n : nullptr, y + (size_t)tile.first * n, part, 0, tile.count,
                n, k, n);
}
VX_EXPORT(experts_gemv)

// The same with a matrix for each head: y[t, h] = x[t, h] w[h]^T.
// Layout: x (M, ..) with rows `x_pitch` apart and heads `x_head`, y likewise; w (H, N, K) of elem.
// Grid:   (ceil(N / ROWS), ceil(M / VX_TOKENS), H).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS(4))
heads_gemv(const elem* __restrict__ x, const elem* __restrict__ w, out_elem* __restrict__ y, int m, int n, int k,
           int x_pitch, int x_head, int y_pitch, int y_head) {
  __shared__ float part[WARPS][ROWS * VX_TOKENS];
  int head = blockIdx.z;
  multiply_tile(x + (size_t)head * x_head, OwnRow{x_pitch}, w + (size_t)head * n * k, nullptr,
                y + (size_t)head * y_head, part, blockIdx.y * VX_TOKENS, m, n, k, y_pitch);
}
VX_EXPORT(heads_gemv)
