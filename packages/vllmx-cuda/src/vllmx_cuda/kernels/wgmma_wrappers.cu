// wgmma_wrappers: what each PTX wrapper of vx_hopper.h computes, for one warpgroup of sm_90a. A
//           GPU's results are the proof that the emulator's twins do the same; models do not
//           launch it.
//
// Layout: a (64, 128) and b (128, 128) of elem.
//         scores (64, 128 + 64): a b^T by descriptors, 128 columns at once, then the last 64;
//         values (64, 128 + 64): the same columns of a b with a in registers, twice what it is for
//         the last 64, which are added to themselves; powers (128): 2^x of scores' first column
//         over 8.
// Grid:   one block of 128 threads.
// Floor:  none.
#include "vx_hopper.h"

#define ROWS 64
#define SIZE 128  // of K, and rows of b

template <int SUMS> VX_DEV void write_sums(float* to, const float (&d)[SUMS]) {
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < SUMS; i++)
    to[(row + i / 2 % 2 * 8) * (SIZE + 64) + i / 4 * 8 + column + i % 2] = d[i];
}

VX_DEV void copy_tile(elem* tile, const elem* from, int rows) {
  for (int i = threadIdx.x; i < rows * SIZE / 8; i += 128) {
    int row = i / (SIZE / 8), column = i % (SIZE / 8) * 8;
    store_pack(tile + vx_swizzled(row, column, rows), load_pack<elem, 8>(from + row * SIZE + column));
  }
}

extern "C" __global__ void __launch_bounds__(128)
wgmma_wrappers(const elem* __restrict__ a, const elem* __restrict__ b, float* __restrict__ scores,
               float* __restrict__ values, float* __restrict__ powers) {
  VX_DYNAMIC_SHARED_TILES(memory);
  elem* tile_a = reinterpret_cast<elem*>(memory);
  elem* tile_b = tile_a + ROWS * SIZE;
  copy_tile(tile_a, a, ROWS);
  copy_tile(tile_b, b, SIZE);
  vx_fence_async();
  __syncthreads();

  u64 of_a = vx_matrix_descriptor(tile_a, 0), of_b = vx_matrix_descriptor(tile_b, SIZE * 128);
  u64 half_b = vx_matrix_at(of_b, 64 * 128), chunk_b = vx_matrix_at(of_b, SIZE * 128);
  u32 fragments[SIZE / 16][4];
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < SIZE / 4; i++)
    fragments[i / 4][i % 4] = *reinterpret_cast<const u32*>(
        a + (row + i % 2 * 8) * SIZE + i / 4 * 16 + i % 4 / 2 * 8 + column);
  float wide[64], narrow[32], wide_values[64], narrow_values[32];

  vx_wgmma_fence();
#pragma unroll
  for (int step = 0; step < SIZE / 16; step++) {  // a chunk has four steps of 32 bytes
    u32 at_a = step / 4 * ROWS * 128 + step % 4 * 32, at_b = step / 4 * SIZE * 128 + step % 4 * 32;
    vx_wgmma(wide, vx_matrix_at(of_a, at_a), vx_matrix_at(of_b, at_b), step > 0, elem());
    vx_wgmma(narrow, vx_matrix_at(of_a, at_a), vx_matrix_at(half_b, at_b), step > 0, elem());
  }
  vx_wgmma_commit();
#pragma unroll
  for (int pass = 0; pass < 3; pass++)
#pragma unroll
    for (int step = 0; step < SIZE / 16; step++) {
      bool add = step > 0 || pass == 2;
      u32 at = step * 16 * 128;
      if (pass == 0) vx_wgmma(wide_values, fragments[step], vx_matrix_at(of_b, at), add, elem());
      if (pass > 0) vx_wgmma(narrow_values, fragments[step], vx_matrix_at(chunk_b, at), add, elem());
    }
  vx_wgmma_commit();
  vx_wgmma_wait<1>();
  vx_wgmma_pin(wide), vx_wgmma_pin(narrow);
  write_sums(scores, wide);
  write_sums(scores + SIZE, narrow);
  vx_wgmma_wait<0>();
  vx_wgmma_pin(wide_values), vx_wgmma_pin(narrow_values);
  write_sums(values, wide_values);
  write_sums(values + SIZE, narrow_values);
  if (column == 0) powers[row] = vx_exp2(wide[0] / 8), powers[64 + row] = vx_exp2(wide[0] / -8);
  if (column == 0) powers[row + 8] = vx_exp2(wide[2] / 8), powers[72 + row] = vx_exp2(wide[2] / -8);
}
VX_EXPORT(wgmma_wrappers)
