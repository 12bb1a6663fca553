// Blocks of a GGUF file as they are stored -> codes and factors in the order of w4_codes.h, while weights are loaded.
//
// Layout: blocks (N, K / values of a block) as in the file; data: rows of tiles, codes and then records. fault: one u32 that was 0,
//         the bits of the greatest factor beyond what f16 holds; NaN counts as greater than any.
// Grid:   (N / 16, ceil(K / 64 / 8)), 256 threads, a warp a tile: a lane unpacks 32 values of one row to shared memory, writes
//         their factors, and takes its fragments from there. N is a multiple of 16, K of 32.
// Floor:  the host's link, 25 to 60 GB/s. Reading blocks by halves of words makes a lane's loads 9 (Q4_0) to 34 (Q6_K) of 16 lines
//         each: at the least 350 GB/s on 132 SMs. A lane writes 16 bytes at once.
#include "gguf_blocks.h"
#if VX_BLOCK == VX_Q6_K
#define VX_BITS 6
#elif VX_BLOCK == VX_Q8_0
#define VX_BITS 8
#endif
#if VX_BLOCK == VX_Q4_1 || VX_BLOCK == VX_Q4_K
#define VX_ZERO 2
#endif
#include "w4_tile.h"

#define GROUPS_A_RUN (HALVES ? 2 : 1)
#define MOST 65504.f  // that f16 holds

// Into the record of one row's group
VX_DEV void put_factors(u8* record, int row, float scale, float minimum, u32* fault) {
  f16* factors = reinterpret_cast<f16*>(record);
  factors[row] = from_float<f16>(scale);
  if (!(fabsf(scale) <= MOST)) atomicMax(fault, (u32)__float_as_int(fabsf(scale)));
  if (VX_ZERO != 2) return;
  factors[TILE_ROWS + row] = from_float<f16>(minimum);
  if (!(fabsf(minimum) <= MOST)) atomicMax(fault, (u32)__float_as_int(fabsf(minimum)));
}

extern "C" __global__ void __launch_bounds__(256)
w4_repack_blocks(const u8* __restrict__ blocks, u8* __restrict__ data, u32* fault, int k) {
  __shared__ u32 shared[8][CODES_WORDS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (k + TILE_COLS - 1) / TILE_COLS;
  int runs = k / RUN, tile = blockIdx.y * 8 + warp;
  if (tile >= tiles) return;
  data += blockIdx.x * row_bytes(tiles, runs * GROUPS_A_RUN);
  int row = lane % TILE_ROWS, half = lane / TILE_ROWS, i = 2 * tile + half;
  u32* own = shared[warp] + row * CODE_PITCH + half * (RUN / 4);
  Run run;
  if (i < runs) {
    unpack(run, blocks + ((size_t)blockIdx.x * TILE_ROWS + row) * (runs / RUNS_A_BLOCK) * BLOCK_BYTES, i);
    u8* record = data + (size_t)tiles * TILE_BYTES + (size_t)i * GROUPS_A_RUN * RECORD_BYTES;
#pragma unroll
    for (int group = 0; group < GROUPS_A_RUN; group++)
      put_factors(record + group * RECORD_BYTES, row, run.scale[group], -run.low[group], fault);
  }
#pragma unroll
  for (int j = 0; j < RUN / 4; j++) {
    u32 codes = 0;
    if (i < runs) {
      codes = (u32)run.codes[j];
      // signed codes are counted from the middle
      if (VX_ZERO == 0 && VX_BITS > 4) codes = (codes ^ 0x80808080u) - (128 - MIDDLE) * 0x01010101u;
    }
    own[j] = codes;
  }
  __syncwarp();
  store_tile(data + (size_t)tile * TILE_BYTES, shared[warp], lane);
}
VX_EXPORT(w4_repack_blocks)
