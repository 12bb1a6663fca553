// y = x w^T + bias for many tokens, x and w of FP8 e4m3 codes with scales for each 128 columns, on tensor
// cores that multiply such codes.
//
// Layout: x (M, K) and w (N, K) of codes, K a multiple of 16; x_scales (ceil(K / 128), x_pitch) of f32, one for
//         each token in each 128 columns; w_scales (ceil(N / 128), scales_pitch) of f32; bias (N) of f32 or null;
//         y of elem, or of f32 with VX_OUT 1, (M, N) with rows `pitch` apart. The sums of 128 products, which
//         tensor cores keep with few bits, meet their scales in f32.
// Grid:   (ceil(N / 128), ceil(M / 128)), 256 threads: 8 warps of 64 tokens x 32 outputs. cp.async fills a ring of
//         three stages of 128 columns, a row of 128 bytes each, whose chunks of 16 lie at chunk ^ row % 8, so
//         that ldmatrix finds 8 rows in 8 different banks; 96 KB.
// Floor:  products: 2 M N K at the rate of FP8; codes are read once for each 128 rows of the other side, from L2.
//         The loop takes 311 instructions for 64 QMMA (sm_89): 622 issue slots for 2,048 cycles of products.
#include "code_scale.h"
#include "outputs.h"
#include "vx.h"

#define BLOCK 128  // tokens, outputs and columns of a stage
#define STAGES 3
#define SIDE_BYTES (BLOCK * BLOCK)
#define WARP_TOKENS 64
#define WARP_OUTPUTS 32
#define STEPS 4  // of 32 columns

VX_DEV u32 place(int row, int chunk) { return (u32)(row * BLOCK + (chunk ^ row % 8) * 16); }

// Enqueues the copies of 128 columns of 128 rows of one side: 8 threads a row, 4 rows a thread. limit: its
// last row, which stands for those beyond; columns beyond the last are zeros.
VX_DEV void fetch(u8* side, const u8* codes, int row0, int limit, int column, int k) {
  int chunk = threadIdx.x % 8, at = column + chunk * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = threadIdx.x / 8 + 32 * i;
    const u8* from = codes + (size_t)min(row0 + row, limit) * k;
    vx_cp_async16(side + place(row, chunk), from + (at < k ? at : 0), at < k ? 16 : 0);
  }
}

// Fragments A of 16 rows for all steps, of B for 8 rows each and two steps in one: see vx_ldmatrix_x4
VX_DEV void load_tokens(u32 (&a)[STEPS][4], const u8* side, int row0, int lane) {
#pragma unroll
  for (int s = 0; s < STEPS; s++) vx_ldmatrix_x4(a[s], side + place(row0 + lane % 16, 2 * s + lane / 16));
}
VX_DEV void load_outputs(u32 (&b)[STEPS][2], const u8* side, int row0, int lane) {
#pragma unroll
  for (int s = 0; s < STEPS; s += 2) {
    u32 two[4];
    vx_ldmatrix_x4(two, side + place(row0 + lane % 8, 2 * s + lane / 8));
    b[s][0] = two[0], b[s][1] = two[1], b[s + 1][0] = two[2], b[s + 1][1] = two[3];
  }
}

extern "C" __global__ void __launch_bounds__(256)
codes8_blocks(const u8* __restrict__ x, const float* __restrict__ x_scales, const u8* __restrict__ w,
              const float* __restrict__ w_scales, const float* __restrict__ bias, out_elem* __restrict__ y,
              int m, int n, int k, int x_pitch, int pitch) {
  VX_DYNAMIC_SHARED(shared);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int row0 = blockIdx.x * BLOCK, token0 = blockIdx.y * BLOCK, groups = (k + BLOCK - 1) / BLOCK;
  int warp_token = warp / 4 * WARP_TOKENS, warp_row = warp % 4 * WARP_OUTPUTS;
  u8* ring[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; s++) ring[s] = shared + s * 2 * SIDE_BYTES;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < groups) {
      fetch(ring[s], x, token0, m - 1, s * BLOCK, k);
      fetch(ring[s] + SIDE_BYTES, w, row0, n - 1, s * BLOCK, k);
    }
    vx_cp_commit();
  }
  float sums[4][4][4] = {};
  u8 *stage = ring[0], *empty = ring[STAGES - 1];
  for (int group = 0; group < groups; group++) {
    float scale = w_scales[(size_t)blockIdx.x * scales_pitch(groups, BLOCK) + group], scales[4][2];
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int token = min(token0 + warp_token + 16 * t + 8 * h + lane / 4, m - 1);
        scales[t][h] = x_scales[(size_t)group * x_pitch + token] * scale;
      }
    vx_cp_wait<STAGES - 2>();
    __syncthreads();  // all have copied this stage, and read the one to fill
    if (group + STAGES - 1 < groups) {
      fetch(empty, x, token0, m - 1, (group + STAGES - 1) * BLOCK, k);
      fetch(empty + SIDE_BYTES, w, row0, n - 1, (group + STAGES - 1) * BLOCK, k);
    }
    vx_cp_commit();
    u32 b[4][STEPS][2];
#pragma unroll
    for (int r = 0; r < 4; r++) load_outputs(b[r], stage + SIDE_BYTES, warp_row + 8 * r, lane);
#pragma unroll
    for (int t = 0; t < 4; t++) {
      u32 a[STEPS][4];
      load_tokens(a, stage, warp_token + 16 * t, lane);
      float part[4][4] = {};
#pragma unroll
      for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int r = 0; r < 4; r++) vx_mma_e4m3(part[r], a[s], b[r][s]);
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[t][r][e] += scales[t][e / 2] * part[r][e];
    }
    empty = stage;
    stage = stage + 2 * SIDE_BYTES < shared + STAGES * 2 * SIDE_BYTES ? stage + 2 * SIDE_BYTES : shared;
  }
  vx_cp_wait<0>();
#pragma unroll
  for (int t = 0; t < 4; t++)
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int token = token0 + warp_token + 16 * t + 8 * (e / 2) + lane / 4;
        int row = row0 + warp_row + 8 * r + 2 * (lane % 4) + e % 2;
        if (token >= m || row >= n) continue;
        float sum = sums[t][r][e] + (bias ? bias[row] : 0.f);
        y[(size_t)token * pitch + row] = from_float<out_elem>(sum);
      }
}
VX_EXPORT(codes8_blocks)
