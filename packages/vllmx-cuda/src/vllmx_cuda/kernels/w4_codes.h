// Matrices of 4-, 6- or 8-bit codes in the order of the tensor cores' fragments:
// weight = scale * (code - zero), or scale * code + minimum, with the factors of a group of columns.
//
// Codes:   tiles of 16 rows x 64 columns; those of the same rows follow each other, then come the records of
//          these rows. Lane 4 g + q of a warp has rows g and g + 8 and, in each half of 32 columns, columns 8 q .. 8 q + 7: two k-steps
//          of mma.m16n8k16. Step s takes columns 4 s .. 4 s + 3 of the 8: pair p (columns 4 s + 2 p and the
//          next) of row g + 8 h is register h + 2 p of fragment A.
//          4 bits: 16 bytes a lane and tile; word 2 half + s, nibble h + 2 p + 4 (odd column).
//          8 bits: 16 bytes a lane and half; word 2 s + p, byte 2 h + (odd column).
//          6 bits: step s takes columns 16 s + 4 q .. + 3 of the half, for groups are of 16. The low 4 bits as
//          above; behind those of all lanes come 8 bytes each with the high 2: word half, bit
//          2 (h + 2 p + 4 s) + 16 (odd column).
// Records: for each group 16 scales of VX_SCALE, one a row; then with VX_ZERO 1 16 zeros
//          of u8, with VX_ZERO 2 16 minima of VX_SCALE. VX_ZERO 0: zero is the middle, 8 or 128.
// Columns are padded with codes 0 to whole tiles. The group of column c is c >> group_shift, of 32 columns at
// least, with 6 bits of 16.
#pragma once
#include "vx.h"

#ifndef VX_BITS
#define VX_BITS 4
#endif
#ifndef VX_SCALE
#define VX_SCALE VX_F16
#endif
#ifndef VX_ZERO
#define VX_ZERO 0
#endif
#define TILE_ROWS 16
#define TILE_COLS 64
#define TILE_BYTES (TILE_ROWS * TILE_COLS * VX_BITS / 8)
#define HALF_COLS 32
#define LANE_COLS (VX_BITS == 6 ? 4 : 8)  // neighbours that a lane has
#define HIGH_AT 512  // of 6 bits: where a tile's high ones begin
#if VX_SCALE == VX_F32
typedef float scale_type;
#elif VX_SCALE == VX_F16
typedef f16 scale_type;
#else
typedef bf16 scale_type;
#endif
#define SCALES_BYTES (TILE_ROWS * (VX_SCALE == VX_F32 ? 4 : 2))
#define RECORD_BYTES (SCALES_BYTES + (VX_ZERO == 1 ? TILE_ROWS : VX_ZERO == 2 ? SCALES_BYTES : 0))
#define MIDDLE (1 << (VX_BITS - 1))

// Of 16 rows
VX_DEV size_t row_bytes(int tiles, int groups) {
  return (size_t)tiles * TILE_BYTES + (size_t)groups * RECORD_BYTES;
}

// Of one row in one group. With VX_ZERO 2 low is the minimum.
struct Factors {
  float scale, low;
  int zero;
};
VX_DEV Factors factors_of(const u8* record, int row) {
  const scale_type* scales = reinterpret_cast<const scale_type*>(record);
  Factors factors = {to_float(scales[row]), 0.f, MIDDLE};
  if (VX_ZERO == 1) factors.zero = record[SCALES_BYTES + row];
  if (VX_ZERO == 2) factors.low = to_float(scales[TILE_ROWS + row]);
  return factors;
}
