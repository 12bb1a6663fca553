// Codes in the order of fragments (w4_codes.h) -> rows of elem, for products with many tokens.
//
// Layout: data of rows (N, K), from a row of tiles on; y (N, K) of elem. K is a multiple of 32.
// Grid:   (ceil(N / 16), ceil(K / 64 / 8)), 256 threads, a warp a tile; a lane writes 8 neighbours.
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
    const u8* record = records + (column >> group_shift) * RECORD_BYTES;
    uint4 packed = *reinterpret_cast<const uint4*>(own + (VX_BITS == 8 ? half * 512 : 0));
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int local = lane / 4 + 8 * h, row = blockIdx.x * TILE_ROWS + local;
      Factors f = factors_of(record, local);
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        int s = i / 4, p = i / 2 % 2, odd = i % 2;
        u32 word = VX_BITS == 4 ? words[2 * half + s] : words[2 * s + p];
        int shift = VX_BITS == 4 ? 4 * (h + 2 * p + 4 * odd) : 8 * (2 * h + odd);
        values[i] = value_of(f, (int)(word >> shift & ((1 << VX_BITS) - 1)));
      }
      if (row < n) store(y + (size_t)row * k + column + lane % 4 * 8, values);
    }
  }
}
VX_EXPORT(w4_dequantize)
