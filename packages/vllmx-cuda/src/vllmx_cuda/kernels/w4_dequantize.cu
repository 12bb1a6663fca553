// Codes in the order of fragments (w4_codes.h) -> rows of elem, for products with many tokens.
//
// Layout: data of rows (N, K), from a row of tiles on; y (N, K) of elem. K is a multiple of 32.
// Grid:   (ceil(N / 16), ceil(K / 64 / 8)), 256 threads, a warp a tile; a lane writes 8 or twice 4 neighbours.
// Floor:  bytes: codes and records once in, elem once out.
#include "w4_codes.h"

VX_DEV float value_of(const Factors& f, int code) {
  if (VX_ZERO == 2) return __fadd_rn(__fmul_rn(f.scale, (float)code), f.low);
  return __fmul_rn((float)(code - f.zero), f.scale);
}

extern "C" __global__ void __launch_bounds__(256)
w4_dequantize(const u8* __restrict__ data, elem* __restrict__ y, int n, int k, int group_shift) {
  int lane = threadIdx.x % 32, tiles = (k + TILE_COLS - 1) / TILE_COLS;
  int groups = ((k - 1) >> group_shift) + 1, tile = blockIdx.y * 8 + threadIdx.x / 32;
  if (tile >= tiles) return;
  data += blockIdx.x * row_bytes(tiles, groups);
  const u8 *own = data + (size_t)tile * TILE_BYTES + lane * 16, *records = data + (size_t)tiles * TILE_BYTES;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int column = tile * TILE_COLS + half * HALF_COLS;
    if (column >= k) return;
    uint4 packed = *reinterpret_cast<const uint4*>(own + (VX_BITS == 8 ? half * 512 : 0));
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
    u32 high = VX_BITS == 6 ? *reinterpret_cast<const u32*>(own + HIGH_AT - lane * 8 + half * 4) : 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int local = lane / 4 + 8 * h, row = blockIdx.x * TILE_ROWS + local;
      float values[8 / LANE_COLS][LANE_COLS];
#pragma unroll
      for (int part = 0; part < 8 / LANE_COLS; part++) {
        int first = column + part * 16 + lane % 4 * LANE_COLS;
        Factors f = factors_of(records + (first >> group_shift) * RECORD_BYTES, local);
#pragma unroll
        for (int i = 0; i < LANE_COLS; i++) {
          int s = VX_BITS == 6 ? part : i / 4, p = i / 2 % 2, odd = i % 2;
          u32 word = VX_BITS == 8 ? words[2 * s + p] : words[2 * half + s];
          int shift = VX_BITS == 8 ? 8 * (2 * h + odd) : 4 * (h + 2 * p + 4 * odd);
          int code = (int)(word >> shift & (VX_BITS == 8 ? 255 : 15));
          if (VX_BITS == 6) code |= (int)(high >> (2 * (h + 2 * p + 4 * s) + 16 * odd) & 3) << 4;
          values[part][i] = value_of(f, code);
        }
        if (row < n) store(y + (size_t)row * k + first, values[part]);
      }
    }
  }
}
VX_EXPORT(w4_dequantize)
