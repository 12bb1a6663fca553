// y = x w^T + bias for up to 16 tokens at a time, on tensor cores; the weights are read once.
//
// Layout: x (M, K), w (N, K) of elem, bf16 or f16; bias (N) of f32 or null; y of elem, or of f32 with VX_OUT 1,
//         (M, N) with rows `pitch` apart. K is a multiple of 32. Sums in f32.
// Grid:   (ceil(N / (8 * VX_ROWS)), ceil(M / (8 * VX_TILES)), splits: a power of two),
//         256 threads. K is cut to 8 * splits pieces,
//         one a warp, whose sums are added in an order that neither M nor the options change: a token has the
//         same bits in every batch. partial, arrivals: see store_parts. Rows of w are the columns of fragment B,
//         so that a block may have only 8 of them: with few outputs there is still one for each processor. The
//         order of K inside a product is free as long as both sides agree: a lane takes 8 neighbours with one
//         16-byte load, and feeds two products, which have sums of their own to wait half as long for each other.
// Floor:  bytes of w, once for each tile of tokens. A ring in registers holds 8 loads of w of each thread under
//         way, 32 KB a block, at all times: a load follows each product, not each ring.
#include "expert_tiles.h"
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

// What a lane holds of a unit: 8 neighbours of each of its rows and tokens
struct Unit {
  uint4 w[VX_ROWS], x[VX_TILES];
};

VX_DEV void fetch(Unit& unit, const elem* const (&rows)[VX_ROWS], const elem* const (&tokens)[VX_TILES],
                  int at) {
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++) unit.w[r] = vx_load_once(rows[r] + at);
#pragma unroll
  for (int t = 0; t < VX_TILES; t++) unit.x[t] = *reinterpret_cast<const uint4*>(tokens[t] + at);
}

VX_DEV void multiply(float (&sums)[2][VX_ROWS][4], const Unit& unit) {
  uint4 top = unit.x[0], low = make_uint4(0, 0, 0, 0);
  if (VX_TILES == 2) low = unit.x[VX_TILES - 1];
  const u32 first[4] = {top.x, low.x, top.y, low.y}, second[4] = {top.z, low.z, top.w, low.w};
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++) {
    const uint4& w = unit.w[r];
    const u32 w_first[2] = {w.x, w.y}, w_second[2] = {w.z, w.w};
    vx_mma(sums[0][r], first, w_first, elem());
    vx_mma(sums[1][r], second, w_second, elem());
  }
}

// One tile of tokens: token i of m reads x from `row_of(i)` on, and writes row `token0 + i` of y.
template <class Rows>
VX_DEV void multiply_tile(const elem* __restrict__ x, Rows row_of, const elem* __restrict__ w,
                          const float* __restrict__ bias, out_elem* __restrict__ y,
                          float* partial, u32* arrivals, float* part, int* arrived, int token0, int m,
                          int n, int k, int pitch) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  int row0 = blockIdx.x * ROWS;
  int units = k / COLS, piece = blockIdx.z * WARPS + warp, shift = 31 - __clz(gridDim.z * WARPS);
  int unit = piece * units >> shift, end = (piece + 1) * units >> shift;
  const elem *rows[VX_ROWS], *tokens[VX_TILES];
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++)
    rows[r] = w + (size_t)min(row0 + 8 * r + group, n - 1) * k + unit * COLS + quarter * 8;
#pragma unroll
  for (int t = 0; t < VX_TILES; t++)
    tokens[t] = x + row_of(min(token0 + 8 * t + group, m - 1)) + unit * COLS + quarter * 8;

  float sums[2][VX_ROWS][4] = {};
  Unit ring[IN_FLIGHT];
#pragma unroll
  for (int s = 0; s < IN_FLIGHT; s++)
    if (unit + s < end) fetch(ring[s], rows, tokens, s * COLS);
  for (; unit < end; unit += IN_FLIGHT) {
#pragma unroll
    for (int s = 0; s < IN_FLIGHT; s++) {
      if (unit + s >= end) break;
      multiply(sums, ring[s]);
      if (unit + s + IN_FLIGHT < end) fetch(ring[s], rows, tokens, (s + IN_FLIGHT) * COLS);
    }
#pragma unroll
    for (int r = 0; r < VX_ROWS; r++) rows[r] += IN_FLIGHT * COLS;
#pragma unroll
    for (int t = 0; t < VX_TILES; t++) tokens[t] += IN_FLIGHT * COLS;
  }
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++)
#pragma unroll
    for (int e = 0; e < 2 * VX_TILES; e++)  // the other half: tokens that are not there
      part[(warp * TOKENS + group + 8 * (e / 2)) * (ROWS + PADDING) + 8 * r + 2 * quarter + e % 2] =
          sums[0][r][e] + sums[1][r][e];
  store_parts<WARPS, ROWS, TOKENS>(y, part, bias, partial, arrivals, arrived, token0, row0, m, n, pitch);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
linear_mma(const elem* __restrict__ x, const elem* __restrict__ w, const float* __restrict__ bias,
           out_elem* __restrict__ y, float* partial, u32* arrivals, int m, int n, int k, int pitch) {
  __shared__ float part[WARPS * TOKENS * (ROWS + PADDING)];
  __shared__ int arrived;
  multiply_tile(x, OwnRow{k}, w, bias, y, partial, arrivals, part, &arrived, blockIdx.y * TOKENS, m, n, k, pitch);
}
VX_EXPORT(linear_mma)

// The same with the matrix of one of X experts for each tile (expert_tiles.h).
// Grid: (ceil(N / (8 * VX_ROWS)), tiles).
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
experts_mma(const elem* __restrict__ x, const elem* __restrict__ w, const float* __restrict__ bias,
            const int* __restrict__ order, const int* __restrict__ tiles, out_elem* __restrict__ y, int share,
            int n, int k) {
  __shared__ float part[WARPS * TOKENS * (ROWS + PADDING)];
  ExpertTile tile = tile_of(tiles, blockIdx.y);
  if (tile.count == 0) return;
  multiply_tile(x, RowOfSlot{order, tile.first, share, k}, w + (size_t)tile.expert * n * k,
                bias ? bias + (size_t)tile.expert * n : nullptr, y + (size_t)tile.first * n, nullptr, nullptr,
                part, nullptr, 0, tile.count, n, k, n);
}
VX_EXPORT(experts_mma)
