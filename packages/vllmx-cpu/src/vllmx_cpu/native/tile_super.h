// Quantised weights in units of 256 columns multiplied by AMX tiles, 16 output rows at a time. A unit is
// brought into the shape of tiles once, then all tokens pass by. The integer sums are those of SuperBlocks,
// and so are the floats: the bits are the same.
#pragma once
#include "block_kinds.h"
#include "tiles.h"

namespace vx {
namespace VX_ISA {

VX_INLINE U32x16 multiply_words(U32x16 a, U32x16 b) {
  return (U32x16)_mm512_mullo_epi16((__m512i)a, (__m512i)b);
}
VX_INLINE U32x16 subtract_words(U32x16 a, U32x16 b) {
  return (U32x16)_mm512_sub_epi16((__m512i)a, (__m512i)b);
}
VX_INLINE U32x16 shift_words(U32x16 v, int n) { return (U32x16)_mm512_srli_epi16((__m512i)v, n); }

// One unit of 256 columns. Group scales are multiplied into the codes, so that one sum serves all
// groups. The products have up to 14 bits and are cut into two bytes, low + (high << SHIFT): unsigned
// scales into parts of three bits, so that both products fit a byte; signed ones after the product.
template <class Format>
struct SuperTiles : SuperBlocks<Format> {
  typedef SuperBlocks<Format> Blocks;
  static constexpr bool CUT_SCALES = Blocks::MINIMA;
  enum {
    STEPS = 16, FROM_TOKENS = 4, MAX_SCALE = Format::NIBBLE_SCALES ? 15 : 63,
    MAX_CODE = (1 << Format::BITS) - 1, PLANES = CUT_SCALES && MAX_CODE * MAX_SCALE < 256 ? 1 : 2,
    SHIFT = CUT_SCALES ? 3 : 8, PLANE_BYTES = 64 * 64, UNPACKED_BYTES = PLANES * PLANE_BYTES,
  };
  static_assert(!CUT_SCALES || PLANES == 1 || MAX_CODE * 7 < 256, "a product exceeds its byte");

  VX_INLINE const uint8_t* unpack(const uint8_t* block, int32_t u, uint8_t* room) {
    const uint8_t* unit = block + (size_t)u * Blocks::UNIT_BYTES;
    for (int i = 0; i < 8; ++i) {
      U32x16 w[8];
      load_codes<Format>(unit + Format::codes(i), w);
      const U32x16 first = twice(Blocks::scale_of(unit, i * Blocks::PER_32));
      const U32x16 second = twice(Blocks::scale_of(unit, i * Blocks::PER_32 + Blocks::PER_32 - 1));
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j)
        store_products(room + (i * 8 + j) * 64, w[j], Blocks::PER_32 == 2 && j >= 4 ? second : first);
    }
    return room;
  }

  // c: [tokens][32] accumulators of 16 rows; sums: room for [TILE_TOKENS][PLANES][16].
  static void multiply_unit(const uint8_t* tiles, const uint8_t* block, int32_t u, int32_t,
                            const uint8_t* x, int32_t tokens, float* c, int32_t* sums) {
    if (tokens > 16)
      multiply_tiles<2>(tiles, x, sums);
    else
      multiply_tiles<1>(tiles, x, sums);
    const typename Blocks::Scales scales =
        Blocks::load_scales(block + (size_t)u * Blocks::UNIT_BYTES);
    for (int32_t t = 0; t < tokens; ++t, x += Blocks::PANEL_BYTES, sums += PLANES * 16) {
      I32x16 total = load_i32(sums);
      if (PLANES == 2) total = total + (load_i32(sums + 16) << (int)SHIFT);
      store(c + t * 32, Blocks::add(load(c + t * 32), total, scales, x));
    }
  }

 private:
  // A value in both 16-bit halves of each lane.
  VX_INLINE U32x16 twice(I32x16 v) { return (as_u32(v) & splat_u32(0xffff)) | (as_u32(v) << 16); }

  VX_INLINE void store_products(uint8_t* out, U32x16 w, U32x16 scale) {
    if constexpr (CUT_SCALES && PLANES == 1) {  // two bytes in a word do not touch each other
      store_u32(out, multiply_words(w, scale));
    } else if constexpr (CUT_SCALES) {
      store_u32(out, multiply_words(w, scale & splat_u32(0x00070007u)));
      store_u32(out + PLANE_BYTES, multiply_words(w, shift_words(scale, SHIFT)));
    } else {
      const U32x16 low = splat_u32(0x00ff00ffu), zero = splat_u32(0x00010001u * Format::ZERO);
      const U32x16 even = multiply_words(subtract_words(w & low, zero), scale);
      const U32x16 odd = multiply_words(subtract_words(shift_words(w, 8), zero), scale);
      store_u32(out, (even & low) | (odd & low) << 8);
      store_u32(out + PLANE_BYTES, shift_words(even, 8) | (odd & ~low));
    }
  }

  template <int HALVES>
  VX_INLINE void multiply_tiles(const uint8_t* tiles, const uint8_t* x, int32_t* sums) {
    const int64_t stride = Blocks::PANEL_BYTES, sum_stride = PLANES * 64;
    const uint8_t *a = x + Blocks::QUADS, *b = a + 16 * stride;
    VX_TILE_ZERO(0);
    if (PLANES == 2) VX_TILE_ZERO(1);
    if (HALVES == 2) VX_TILE_ZERO(2);
    if (HALVES == 2 && PLANES == 2) VX_TILE_ZERO(3);
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) {
      VX_TILE_LOAD(6, tiles + step * TILE_BYTES, 64);
      VX_TILE_LOAD(4, a + step * 64, stride);
      VX_TILE_DOT("tdpbsud", 0, 4, 6);
      if (HALVES == 2) {
        VX_TILE_LOAD(5, b + step * 64, stride);
        VX_TILE_DOT("tdpbsud", 2, 5, 6);
      }
      if (PLANES == 1) continue;
      VX_TILE_LOAD(7, tiles + PLANE_BYTES + step * TILE_BYTES, 64);
      if (CUT_SCALES) {
        VX_TILE_DOT("tdpbsud", 1, 4, 7);
        if (HALVES == 2) VX_TILE_DOT("tdpbsud", 3, 5, 7);
      } else {
        VX_TILE_DOT("tdpbssd", 1, 4, 7);
        if (HALVES == 2) VX_TILE_DOT("tdpbssd", 3, 5, 7);
      }
    }
    VX_TILE_STORE(0, sums, sum_stride);
    if (PLANES == 2) VX_TILE_STORE(1, sums + 16, sum_stride);
    if (HALVES == 2) VX_TILE_STORE(2, sums + 16 * PLANES * 16, sum_stride);
    if (HALVES == 2 && PLANES == 2) VX_TILE_STORE(3, sums + 16 * PLANES * 16 + 16, sum_stride);
  }
};

}  // namespace VX_ISA
}  // namespace vx
