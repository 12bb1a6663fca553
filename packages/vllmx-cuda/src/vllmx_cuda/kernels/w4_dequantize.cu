// w4_dequantize: codes in the order of fragments (w4_codes.h) -> rows of elem, for products with many tokens.
// w4_gather:     rows by number -> elem, for an embedding that is a head as well.
//
// Layout: data of rows (N, K), of w4_dequantize from a row of tiles on; y (N, K) of elem, of w4_gather one row
//         for each of ids. K is a multiple of 32.
// Grid:   w4_dequantize (ceil(N / 16), ceil(K / 64 / 8)), 256 threads, a warp a tile; a lane writes 8 or twice 4
//         neighbours. w4_gather (ids, ceil(K / 8 / 256)), 256 threads, 8 values each.
// Floor:  bytes: codes and records once in, elem once out.
#include "w4_codes.h"

VX_DEV float value_of(const Factors& f, int code) {
  if (VX_ZERO == 2) return __fadd_rn(__fmul_rn(f.scale, (float)code), f.low);
  return __fmul_rn((float)(code - f.zero), f.scale);
}

// What lane `lane` has of row g + 8 h in a half of a tile, which begins at `column`. row: of y.
VX_DEV void write_columns(elem* row, const u8* codes, const u8* records, int lane, int h, int half,
                          int column, int group_shift) {
  uint4 packed = *reinterpret_cast<const uint4*>(codes + lane * 16 + (VX_BITS == 8 ? half * 512 : 0));
  const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
  u32 high = 0;
  if (VX_BITS == 6) high = *reinterpret_cast<const u32*>(codes + HIGH_AT + lane * 8 + half * 4);
#pragma unroll
  for (int part = 0; part < 8 / LANE_COLS; part++) {
    int first = column + part * 16 + lane % 4 * LANE_COLS;
    Factors f = factors_of(records + (first >> group_shift) * RECORD_BYTES, lane / 4 + 8 * h);
    float values[LANE_COLS];
#pragma unroll
    for (int i = 0; i < LANE_COLS; i++) {
      int s = VX_BITS == 6 ? part : i / 4, p = i / 2 % 2, odd = i % 2;
      u32 word = VX_BITS == 8 ? words[2 * s + p] : half ? words[2 + s] : words[s];
      int shift = VX_BITS == 8 ? 8 * (2 * h + odd) : 4 * (h + 2 * p + 4 * odd);
      int code = (int)(word >> shift & (VX_BITS == 8 ? 255 : 15));
      if (VX_BITS == 6) code |= (int)(high >> (2 * (h + 2 * p + 4 * s) + 16 * odd) & 3) << 4;
      values[i] = value_of(f, code);
    }
    store(row + first, values);
  }
}

extern "C" __global__ void __launch_bounds__(256)
w4_dequantize(const u8* __restrict__ data, elem* __restrict__ y, int n, int k, int group_shift) {
  int lane = threadIdx.x % 32, tiles = (k + TILE_COLS - 1) / TILE_COLS;
  int groups = ((k - 1) >> group_shift) + 1, tile = blockIdx.y * 8 + threadIdx.x / 32;
  if (tile >= tiles) return;
  data += blockIdx.x * row_bytes(tiles, groups);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int column = tile * TILE_COLS + half * HALF_COLS;
    if (column >= k) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int row = blockIdx.x * TILE_ROWS + lane / 4 + 8 * h;
      if (row < n)
        write_columns(y + (size_t)row * k, data + (size_t)tile * TILE_BYTES,
                      data + (size_t)tiles * TILE_BYTES, lane, h, half, column, group_shift);
    }
  }
}
VX_EXPORT(w4_dequantize)

extern "C" __global__ void __launch_bounds__(256)
w4_gather(const u8* __restrict__ data, const int* __restrict__ ids, elem* __restrict__ y, int k,
          int group_shift) {
  int unit = blockIdx.y * 256 + threadIdx.x, tile = unit / 8, half = unit / 4 % 2;
  int column = tile * TILE_COLS + half * HALF_COLS, row = ids[blockIdx.x];
  if (column >= k) return;
  int tiles = (k + TILE_COLS - 1) / TILE_COLS, groups = ((k - 1) >> group_shift) + 1;
  data += row / TILE_ROWS * row_bytes(tiles, groups);
  write_columns(y + (size_t)blockIdx.x * k, data + (size_t)tile * TILE_BYTES,
                data + (size_t)tiles * TILE_BYTES, row % 8 * 4 + unit % 4, row % 16 / 8, half, column,
                group_shift);
}
VX_EXPORT(w4_gather)
