// gguf_gemv:    y = x w^T + bias for a few tokens, w in GGUF blocks, by integer dot products.
// experts_gguf: the same with the matrix of one of X experts for each tile of tokens (expert_tiles.h).
//
// Layout: codes (M, K) and scales (M, K / 32, 2) are quantize_q8's; w (N, K / values of a block) as
//         in the file; bias (N) of f32 or null; y (M, pitch), its first N columns, of elem, or of f32
//         with VX_OUT 1. K is a multiple of a block. Of experts: w (X, N, ..), bias (X, N), y (positions, N).
// Grid:   (ceil(N / ROWS), ceil(M / VX_TOKENS) or tiles), 128 threads that share ROWS rows and split K by runs
//         of 32 values; a run is unpacked once for all tokens.
// Floor:  bytes of w, once for each tile of VX_TOKENS tokens.
#include "expert_tiles.h"
#include "gguf_blocks.h"
#include "outputs.h"
#include "vx.h"

#ifndef VX_TOKENS
#define VX_TOKENS 1
#endif
#define THREADS 128
#define WARPS 4
#define ROWS 2

// The product of a run with 32 codes of one token
VX_DEV float run_dot(const Run& run, const i8* codes, uint2 head) {
  Pack<i8, 16> packs[2] = {load_pack<i8, 16>(codes), load_pack<i8, 16>(codes + 16)};
  const int* words = reinterpret_cast<const int*>(packs);
  int dots[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int half = HALVES ? i / 4 : 0;
    dots[half] = vx_dp4a(run.codes[i], words[i], dots[half]);
  }
  float sum = run.scale[0] * dots[0];
  if (HALVES) sum += run.scale[1] * dots[1];
  int first = (short)(head.y & 0xffff), last = (int)head.y >> 16;  // sums of the codes
  if (HAS_LOW && HALVES) sum -= run.low[0] * first + run.low[1] * last;
  if (HAS_LOW && !HALVES) sum -= run.low[0] * (first + last);
  return __int_as_float(head.x) * sum;
}

// row_of(t): the row of codes of token t. SOME: few of VX_TOKENS are usual, the others cost nothing.
template <bool SOME, class RowOf>
VX_DEV void multiply_tile(const i8* codes, const float* scales, RowOf row_of, const u8* w, const float* bias,
                          out_elem* y, float (&part)[WARPS][ROWS * VX_TOKENS], int token0, int m, int n, int k,
                          int pitch) {
  int runs = k / RUN;
  int row0 = blockIdx.x * ROWS;
  size_t row_bytes = (size_t)(runs / RUNS_A_BLOCK) * BLOCK_BYTES;
  float sums[ROWS][VX_TOKENS] = {};
  for (int i = threadIdx.x; i < runs; i += THREADS) {
    Run unpacked[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) unpack(unpacked[r], w + min(row0 + r, n - 1) * row_bytes, i);
#pragma unroll
    for (int t = 0; t < VX_TOKENS; t++) {
      if (SOME && t >= m) break;
      size_t token = row_of(min(token0 + t, m - 1));
      const i8* x = codes + token * k + i * RUN;
      uint2 head = *reinterpret_cast<const uint2*>(scales + 2 * (token * runs + i));
#pragma unroll
      for (int r = 0; r < ROWS; r++) sums[r][t] += run_dot(unpacked[r], x, head);
    }
  }
  store_sums<WARPS>(y, sums, part, bias, token0, row0, m, n, pitch);
}

extern "C" __global__ void __launch_bounds__(THREADS)
gguf_gemv(const i8* __restrict__ codes, const float* __restrict__ scales, const u8* __restrict__ w,
          const float* __restrict__ bias, out_elem* __restrict__ y, int m, int n, int k, int pitch) {
  __shared__ float part[WARPS][ROWS * VX_TOKENS];
  multiply_tile<false>(codes, scales, OwnRow{1}, w, bias, y, part, blockIdx.y * VX_TOKENS, m, n, k, pitch);
}
VX_EXPORT(gguf_gemv)

extern "C" __global__ void __launch_bounds__(THREADS)
experts_gguf(const i8* __restrict__ codes, const float* __restrict__ scales, const u8* __restrict__ w,
             const float* __restrict__ bias, const int* __restrict__ order, const int* __restrict__ tiles,
             out_elem* __restrict__ y, int share, int n, int k) {
  __shared__ float part[WARPS][ROWS * VX_TOKENS];
  ExpertTile tile = tile_of(tiles, blockIdx.y);
  if (tile.count == 0) return;
  size_t first_row = (size_t)tile.expert * n, row_bytes = (size_t)(k / RUN / RUNS_A_BLOCK) * BLOCK_BYTES;
  multiply_tile<true>(codes, scales, RowOfSlot{order, tile.first, share, 1}, w + first_row * row_bytes,
                      bias ? bias + first_row : nullptr, y + (size_t)tile.first * n, part, 0, tile.count, n, k, n);
}
VX_EXPORT(experts_gguf)
