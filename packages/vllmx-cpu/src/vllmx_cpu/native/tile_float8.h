// Float8 weights multiplied by AMX tiles: widened to bf16 a unit at a time. All row counts take this
// path: the tiles add in another order than the vector instruction does.
#pragma once
#include "float8_blocks.h"
#include "tiles.h"

namespace vx {
namespace VX_ISA {

// A unit is four tiles of 16 pairs of columns; every other one has its own sum.
struct Float8Tiles : Float8Blocks {
  enum { STEPS = 16, UNPACKED_BYTES = 4 * TILE_BYTES };

  VX_INLINE const uint8_t* unpack(const uint8_t* block, int32_t u, uint8_t* room) {
    const uint8_t* codes = block + Format::codes(u, 0);
#pragma GCC unroll 4
    for (int j = 0; j < UNIT_COLS / 4; ++j) {
      U32x16 even, odd;
      float8_to_bf16(load_u32(codes + j * 64), &even, &odd);
      store_u32(room + j * 128, even);
      store_u32(room + j * 128 + 64, odd);
    }
    return room;
  }

  // c: [tokens][32] accumulators of 16 rows; sums: room for [TILE_TOKENS][2][16].
  static void multiply_unit(const uint8_t* tiles, const uint8_t* block, int32_t u, int32_t units,
                            const uint8_t* x, int32_t tokens, float* c, int32_t* sums) {
    if (tokens > 16)
      multiply_tiles<2>(tiles, x, sums);
    else
      multiply_tiles<1>(tiles, x, sums);
    const F32x16 scale = load((const float*)(block + Format::scale(u, units)));
    for (int32_t t = 0; t < tokens; ++t) {
      const float* both = (const float*)sums + t * 32;
      store(c + t * 32, fma(scale, load(both) + load(both + 16), load(c + t * 32)));
    }
  }

 private:
  template <int HALVES>
  VX_INLINE void multiply_tiles(const uint8_t* tiles, const uint8_t* x, int32_t* sums) {
    const uint8_t* y = x + 16 * (size_t)PANEL_BYTES;
    VX_TILE_ZERO(0);
    VX_TILE_ZERO(1);
    if (HALVES == 2) VX_TILE_ZERO(2);
    if (HALVES == 2) VX_TILE_ZERO(3);
#pragma GCC unroll 2
    for (int step = 0; step < 4; step += 2) {
      VX_TILE_LOAD(6, tiles + step * TILE_BYTES, 64);
      VX_TILE_LOAD(4, x + step * 64, PANEL_BYTES);
      VX_TILE_DOT("tdpbf16ps", 0, 4, 6);
      if (HALVES == 2) VX_TILE_LOAD(5, y + step * 64, PANEL_BYTES);
      if (HALVES == 2) VX_TILE_DOT("tdpbf16ps", 2, 5, 6);
      VX_TILE_LOAD(7, tiles + (step + 1) * TILE_BYTES, 64);
      VX_TILE_LOAD(4, x + (step + 1) * 64, PANEL_BYTES);
      VX_TILE_DOT("tdpbf16ps", 1, 4, 7);
      if (HALVES == 2) VX_TILE_LOAD(5, y + (step + 1) * 64, PANEL_BYTES);
      if (HALVES == 2) VX_TILE_DOT("tdpbf16ps", 3, 5, 7);
    }
    VX_TILE_STORE(0, sums, 128);
    VX_TILE_STORE(1, sums + 16, 128);
    if (HALVES == 2) VX_TILE_STORE(2, sums + 512, 128);
    if (HALVES == 2) VX_TILE_STORE(3, sums + 528, 128);
  }
};

}  // namespace VX_ISA
}  // namespace vx
