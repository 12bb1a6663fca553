// codes8_mma:     y = x w^T + bias for a few tokens, w of FP8 e4m3 codes as checkpoints store them, on tensor cores
//                 that need not know FP8: codes become bf16 or f16, exactly, and x stays as it is. With VX_GATED
//                 act(gate) * up, as of linear_mma.
// experts_codes8: the same with the matrix of one of X experts for each tile of tokens (expert_tiles.h).
//
// Layout: x (M, K) of elem, bf16 or f16; w (N, K) of codes, K a multiple of 16; scales (ceil(N / block_rows),
//         scales_pitch) of f32, column c in group c >> group_shift, which are of 64 columns at least; bias (N) of
//         f32 or null; y of elem, or of f32 with VX_OUT 1, (M, N) with rows `pitch` apart. residual, squares, norm:
//         as of linear_mma. Scales meet the sums of 64 products, in f32. Of experts: w (X, N, K), scales (X * N / block_rows, ..), which block_rows
//         divides, bias (X, N), y (positions, N). A code that is NaN must have NaN as its scale: it would count as 480.
// Grid:   (ceil(N / (16 * VX_ROWS)), ceil(M / (8 * VX_TILES)), splits), 256 threads. K is cut to 8 * splits
//         pieces of whole tiles of 64 columns, one a warp. The order of columns inside a product is free: lane
//         4 g + q takes columns 16 q .. 16 q + 15 of rows g and g + 8, whose bytes cp.async brings into a ring
//         that no other lane looks at; word s of them is k-step s. So what lies in memory row by row needs
//         no other order. partial, arrivals: see store_fragments.
// Floor:  bytes of w, once for each tile of tokens.
//         The loop (sm_90a, bf16, VX_NORM 0) takes 135 instructions for 1,024 bytes with up to 8 tokens, 34 cycles of
//         four schedulers, where memory brings these to a processor in 71 (H100) or 49 (H200); 321 for 2,048 bytes
//         with 32 tokens, 414 and 64 HMMA with 64.
#include "code_scale.h"
#include "code_values.h"
#include "expert_tiles.h"
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
#define COLS 64
#define LANE_COLS 16
#define ROWS (16 * VX_ROWS)
#define STAGES (VX_ROWS == 1 ? 4 : 3)
#define STAGE_BYTES (ROWS * COLS)
#define RUN 512  // bytes that a warp copies at once: 8 rows

// In f16 the sums make good what the bits of codes lack; 2^120 they could not
#if VX_DTYPE == VX_BF16
#define TWO_VALUES e4m3_pair
#define SUM_FACTOR 1.f
#else
#define TWO_VALUES e4m3_bits
#define SUM_FACTOR 256.f
#endif

VX_DEV u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// A lane's 16 bytes of 8 rows, at `at` of each; zeros beyond the last column
VX_DEV void fetch(u8* stage, const u8* w, const u32 (&rows)[2 * VX_ROWS], int at, bool inside, int lane) {
#pragma unroll
  for (int r = 0; r < 2 * VX_ROWS; r++)
    vx_cp_async16(stage + r * RUN + lane * 16, w + rows[r] + (inside ? at : 0), inside ? 16 : 0);
}

// Adds the products of a tile of columns. b: a lane's 16 values of each token, scales: of its rows.
VX_DEV void multiply(float (&sums)[VX_ROWS][VX_TILES][4], const u8* stage, int lane,
                     const uint4 (&b)[VX_TILES][2], const float (&scales)[2 * VX_ROWS]) {
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++) {
    const uint4* own = reinterpret_cast<const uint4*>(stage + 2 * r * RUN + lane * 16);
    uint4 top = own[0], low = own[RUN / 16];
    u32 a[4][4];
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        a[s][2 * pair] = TWO_VALUES(word_of(top, s), pair);
        a[s][2 * pair + 1] = TWO_VALUES(word_of(low, s), pair);
      }
#pragma unroll
    for (int t = 0; t < VX_TILES; t++) {
      float part[4];
#pragma unroll
      for (int s = 0; s < 4; s++) {
        const uint4& x = b[t][s / 2];
        const u32 pairs[2] = {word_of(x, s % 2 * 2), word_of(x, s % 2 * 2 + 1)};
        if (s == 0) {
          vx_mma_first(part, a[s], pairs, elem());
        } else {
          vx_mma(part, a[s], pairs, elem());
        }
      }
#pragma unroll
      for (int e = 0; e < 4; e++) sums[r][t][e] += scales[2 * r + e / 2] * part[e];
    }
  }
}

// begin_of(t): where the row of x begins that token t reads. shared: the block's.
template <class BeginOf>
VX_DEV void multiply_rows(const elem* x, BeginOf begin_of, const u8* __restrict__ w,
                          const float* __restrict__ scales, const float* __restrict__ bias, out_elem* y,
                          float* partial, u32* arrivals, int* arrived, const Added& added, const Norm& norm,
                          float (&token_scales)[8 * VX_TILES], u8* shared, int token0, int m, int n,
                          int k, int pitch, int block_rows, int group_shift) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int row0 = blockIdx.x * (VX_GATED ? 16 : ROWS);
  int tiles = (k + COLS - 1) / COLS, piece = blockIdx.z * WARPS + warp, pieces = gridDim.z * WARPS;
  int tile = piece * tiles / pieces, end = (piece + 1) * tiles / pieces;
  int mine = lane % 4 * LANE_COLS, groups = ((k - 1) >> group_shift) + 1;
  w += (size_t)row0 * k;
  u32 rows[2 * VX_ROWS], factors[2 * VX_ROWS], tokens[VX_TILES];  // where they begin
#pragma unroll
  for (int r = 0; r < 2 * VX_ROWS; r++) {
    int row = min(row0 + 8 * (VX_GATED ? r % 2 : r) + lane / 4, n - 1) + (VX_GATED ? r / 2 * n : 0);
    rows[r] = (u32)(row - row0) * k;
    factors[r] = (u32)(row / block_rows) * scales_pitch(groups, block_rows);
  }
#pragma unroll
  for (int t = 0; t < VX_TILES; t++) tokens[t] = (u32)begin_of(min(token0 + 8 * t + lane / 4, m - 1));

  float sums[VX_ROWS][VX_TILES][4] = {};
  u8 *ring = shared + warp * STAGES * STAGE_BYTES, *ring_end = ring + STAGES * STAGE_BYTES;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    int at = (tile + s) * COLS + mine;
    if (tile + s < end) fetch(ring + s * STAGE_BYTES, w, rows, at, at < k, lane);
    vx_cp_commit();
  }
  u8 *stage = ring, *empty = ring_end - STAGE_BYTES;
  vx_wait_for_predecessor();
#if VX_NORM
  norm_scales(token_scales, norm, token0, m, k);
#endif
  for (; tile < end; tile++) {
    int at = tile * COLS + mine;
    uint4 b[VX_TILES][2];
#pragma unroll
    for (int t = 0; t < VX_TILES; t++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        b[t][half] = at < k ? *reinterpret_cast<const uint4*>(x + tokens[t] + at + 8 * half)
                            : make_uint4(0, 0, 0, 0);
#if VX_NORM
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float weight[8];
      load(weight, norm.weight + (at < k ? at : 0) + 8 * half);
#pragma unroll
      for (int t = 0; t < VX_TILES; t++) b[t][half] = normed(b[t][half], token_scales[8 * t + lane / 4], weight);
    }
#endif
    float scale[2 * VX_ROWS];
#pragma unroll
    for (int r = 0; r < 2 * VX_ROWS; r++) scale[r] = scales[factors[r] + (tile * COLS >> group_shift)] * SUM_FACTOR;
    vx_cp_wait<STAGES - 2>();
    int next = (tile + STAGES - 1) * COLS + mine;
    if (tile + STAGES - 1 < end) fetch(empty, w, rows, next, next < k, lane);
    vx_cp_commit();
    multiply(sums, stage, lane, b, scale);
    empty = stage;
    stage = stage + STAGE_BYTES < ring_end ? stage + STAGE_BYTES : ring;
  }
  vx_cp_wait<0>();
  __syncthreads();  // the rings end
  store_fragments<WARPS>(y, sums, reinterpret_cast<float*>(shared), bias, partial, arrivals, arrived, added, token0,
                         row0, m, n, pitch);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, VX_ROWS* VX_TILES <= 4 ? 2 : 1)
codes8_mma(const elem* x, const u8* __restrict__ w, const float* __restrict__ scales,
           const float* __restrict__ bias, out_elem* y, float* partial, u32* arrivals, int m, int n, int k, int pitch,
           int block_rows, int group_shift, const elem* residual, float* squares, const float* __restrict__ norm,
           const float* norm_squares, int num_squares, float eps) {
  VX_DYNAMIC_SHARED(shared);
  __shared__ float token_scales[8 * VX_TILES];
  __shared__ int arrived;
  multiply_rows(x, OwnRow{k}, w, scales, bias, y, partial, arrivals, &arrived, {residual, squares},
                {norm, norm_squares, num_squares, eps}, token_scales, shared, blockIdx.y * 8 * VX_TILES, m, n, k, pitch,
                block_rows, group_shift);
}
VX_EXPORT(codes8_mma)

#if !VX_NORM && !VX_GATED && VX_TILES <= 4  // what experts have
extern "C" __global__ void __launch_bounds__(32 * WARPS, VX_ROWS* VX_TILES <= 4 ? 2 : 1)
experts_codes8(const elem* __restrict__ x, const u8* __restrict__ w, const float* __restrict__ scales,
               const float* __restrict__ bias, const int* __restrict__ order, const int* __restrict__ tiles,
               out_elem* __restrict__ y, int share, int n, int k, int block_rows, int group_shift) {
  VX_DYNAMIC_SHARED(shared);
  __shared__ float token_scales[8 * VX_TILES];
  ExpertTile tile = tile_of(tiles, blockIdx.y);
  if (tile.count == 0) return;
  size_t first = (size_t)tile.expert * n;
  int pitch = scales_pitch(((k - 1) >> group_shift) + 1, block_rows);
  multiply_rows(x, RowOfSlot{order, tile.first, share, k}, w + first * k, scales + first / block_rows * pitch,
                bias ? bias + first : nullptr, y + (size_t)tile.first * n, nullptr, nullptr, nullptr, {}, {},
                token_scales, shared, 0, tile.count, n, k, n, block_rows, group_shift);
}
VX_EXPORT(experts_codes8)
#endif
