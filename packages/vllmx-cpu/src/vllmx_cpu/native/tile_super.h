// Quantised weights in units of 256 columns multiplied by AMX tiles: 16 output rows times a pair of panels
// of up to 16 tokens. The integer sums are those of SuperBlocks, and so are the floats: the bits are the
// same.
//
// Group scales are multiplied into the codes, so that one sum serves all groups of a unit. Bringing a unit
// into the shape of tiles is 128 multiplications and as many stores, and a token's floats are five
// instructions, all of them on port 0 (tiles.h), where a product takes 256 cycles for 32 tokens. So they run
// side by side: while a unit is multiplied the next one takes its place, and the sums of the one before it
// are added, in small turns, because a processor does not look far ahead past tiles that it waits for.
#pragma once
#include "block_kinds.h"
#include "tile_panels.h"
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
VX_INLINE U32x16 raise_words(U32x16 v, int n) { return (U32x16)_mm512_slli_epi16((__m512i)v, n); }
// Words of the products of two bytes each, those of `codes` unsigned, added up.
VX_INLINE U32x16 dot_pairs(U32x16 codes, U32x16 scales) {
  return (U32x16)_mm512_maddubs_epi16((__m512i)codes, (__m512i)scales);
}
// Bytes of each lane: `order` has their places, or 0x80 for zero.
VX_INLINE U32x16 pick_bytes(U32x16 v, uint32_t order) {
  const U32x16 lanes = {0, 0x04040404u, 0x08080808u, 0x0c0c0c0cu, 0, 0x04040404u, 0x08080808u, 0x0c0c0c0cu,
                        0, 0x04040404u, 0x08080808u, 0x0c0c0c0cu, 0, 0x04040404u, 0x08080808u, 0x0c0c0c0cu};
  return (U32x16)_mm512_shuffle_epi8((__m512i)v, (__m512i)(lanes + splat_u32(order)));
}
// a where the mask is set, b elsewhere.
VX_INLINE U32x16 merge(U32x16 mask, U32x16 a, U32x16 b) {
  return (U32x16)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)a, (__m512i)b, 0xca);
}

// A token's unit: float scale | 64 quads | with minima the sums of the groups, each as the sum of two bf16,
// which are exact: [2][16].
template <class Format>
struct SuperUnit {
  enum {
    UNIT_COLS = 256, QUADS = 64, DIGITS = SuperBlocks<Format>::MINIMA ? 64 : 0,
    PANEL_BYTES = QUADS + UNIT_COLS + DIGITS,
  };
  static void pack_unit(const float* x, uint8_t* out) {
    int32_t sums[16], groups[16] = {};
    const float scale = quantise<Format>(x, out + QUADS, sums);
    __builtin_memcpy(out, &scale, 4);
    if (DIGITS == 0) return;
    for (int i = 0; i < 16; ++i) groups[i * Format::GROUPS / 16] += sums[i];
    const I32x16 v = load_i32(groups), high = (v + splat_i32(16)) & splat_i32(-32);
    uint16_t* digits = (uint16_t*)(out + QUADS + UNIT_COLS);
    store_u16(digits, as_u32(to_f32(high)) >> 16);
    store_u16(digits + 16, as_u32(to_f32(v - high)) >> 16);
  }
};

// The products of codes and scales have up to 14 bits and are cut into two bytes, low + (high << SHIFT):
// unsigned scales into parts of three bits, so that both products fit a byte; signed ones after the product.
template <class Format>
struct SuperTiles : SuperBlocks<Format> {
  typedef SuperBlocks<Format> Blocks;
  typedef TilePanels<SuperUnit<Format>, 4, SuperUnit<Format>::DIGITS> Panels;
  static constexpr bool MINIMA = Blocks::MINIMA;
  static constexpr bool CUT_SCALES = Blocks::MINIMA;
  enum {
    STEPS = 16, FROM_TOKENS = 4, MAX_SCALE = Format::NIBBLE_SCALES ? 15 : 63,
    MAX_CODE = (1 << Format::BITS) - 1, PLANES = CUT_SCALES && MAX_CODE * MAX_SCALE < 256 ? 1 : 2,
    SHIFT = CUT_SCALES ? 3 : 8, PLANE_BYTES = 64 * 64, LOWS = PLANES * PLANE_BYTES,
    UNPACKED_BYTES = LOWS + (MINIMA ? TILE_BYTES : 0), PARTS = 8, RESULTS = PLANES + MINIMA,
    SUMS = 2 * RESULTS * 256,
  };
  static_assert(!CUT_SCALES || PLANES == 1 || MAX_CODE * 7 < 256, "a product exceeds its byte");

  // A unit of 16 output rows times one or two panels.
  struct UnitProduct {
    const uint8_t* unit;  // the weights, as they lie in memory
    const uint8_t* x[2];  // the panels' activations; x[1] null for one panel
    float* c;             // [2 * tokens][32] accumulators
  };

  // Before the first `unpack`: rows of the tile of minima that it leaves alone.
  VX_INLINE void clear(uint8_t* room) {
    for (int i = 0; MINIMA && i < TILE_BYTES; i += 64) store_u32(room + LOWS + i, splat_u32(0));
  }
  // One of the PARTS of a unit, 32 columns, into the shape of tiles; with the last one the minima. Calls
  // between() in the middle.
  template <class Between>
  VX_INLINE void unpack(const uint8_t* unit, int part, uint8_t* room, Between between) {
    U32x16 w[8];
    load_codes<Format>(unit + Format::codes(part), w);
    room += part * 512;
    const int group = part * Blocks::PER_32;
    const Factors first = factors(unit, group);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) store_products(room + j * 64, w[j], first);
    between();
    const Factors second = Blocks::PER_32 == 1 ? first : factors(unit, group + 1);
#pragma GCC unroll 4
    for (int j = 4; j < 8; ++j) store_products(room + j * 64, w[j], second);
    if (MINIMA && part == PARTS - 1) unpack_minima(unit, room - part * 512 + LOWS);
  }
  VX_INLINE void unpack(const uint8_t* unit, int part, uint8_t* room) {
    unpack(unit, part, room, [] {});
  }

  // Multiplies `now`, whose tiles are in `room`, brings the unit `next` (null for none) into their place and
  // adds the sums of `before` (without x: none), which are in `sums` and, for its second panel, still in
  // the tiles. All panels have `tokens` tokens, a multiple of four, and the tiles are shaped for them.
  template <bool PAIR, class Fetch>
  static void run(const UnitProduct& now, const UnitProduct& before, int32_t tokens, const uint8_t* next,
                  uint8_t* room, int32_t* sums, Fetch* fetch) {
    const bool add_first = before.x[0], add_second = before.x[1];
    typename Blocks::Scales scales;
    if (add_first) scales = Blocks::load_scales(before.unit);
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
      const int half = PAIR ? part % 2 : 0, step = PAIR ? part / 2 : part;
      const bool multiplies = step < 4;
      if (multiplies) load_tiles(now.x[half], step, half, room);
      if (multiplies) multiply_low(step, half);
      const auto multiply_rest = [&]() __attribute__((always_inline)) {
        if (multiplies) multiply_high(step, half);
        if (part == 0 && add_second) store_second(sums);
        if (MINIMA && part == (PAIR ? 1 : 4)) multiply_minima(now.x[0], tokens, room);
        if (MINIMA && part == 5) VX_TILE_STORE(4, sums + PLANES * 256, 64);
        if (MINIMA && PAIR && part == 5) multiply_minima(now.x[1], tokens, room);
      };
      fetch->next();
      if (next)
        unpack(next, part, room, multiply_rest);
      else
        multiply_rest();
      if (add_first && part >= 1 && part < 5) add(before, scales, 0, part - 1, tokens, sums);
      if (add_second && part >= 4) add(before, scales, 1, part - 4, tokens, sums);
    }
    VX_TILE_STORE(0, sums, 64);
    if (PLANES == 2) VX_TILE_STORE(1, sums + 256, 64);
  }

  // Adds the sums of the last product.
  static void finish(const UnitProduct& before, int32_t tokens, int32_t* sums) {
    const typename Blocks::Scales scales = Blocks::load_scales(before.unit);
    if (before.x[1]) store_second(sums);
    for (int half = 0; half < (before.x[1] ? 2 : 1); ++half)
      for (int part = 0; part < 4; ++part) add(before, scales, half, part, tokens, sums);
  }

 private:
  // What codes are multiplied with: low and high parts of the scales as words; or the scales in the even
  // and in the odd bytes, and the format's zero times the scale.
  struct Factors { U32x16 a, b, zero; };
  VX_INLINE Factors factors(const uint8_t* unit, int group) {
    U32x16 four = load_u32(unit + Format::SCALES + Format::group(group));
    const uint32_t g = (uint32_t)(group % 4), word = 0x80008000u | g * 0x00010001u;
    Factors f;
    if constexpr (CUT_SCALES) {
      if (Format::NIBBLE_SCALES) four = four & splat_u32(0x0f0f0f0fu);
      const U32x16 low = four & splat_u32(0x07070707u);
      f.a = pick_bytes(PLANES == 1 ? four : low, word);
      if (PLANES == 2) f.b = pick_bytes(shift_words(four - low, SHIFT), word);
    } else {
      f.a = pick_bytes(four, word);
      f.b = pick_bytes(four, 0x00800080u | g * 0x01000100u);
      f.zero = dot_pairs(splat_u32(0x00010001u * Format::ZERO), f.a);
    }
    return f;
  }

  VX_INLINE void store_products(uint8_t* out, U32x16 w, const Factors& f) {
    if constexpr (CUT_SCALES) {  // two bytes in a word do not touch each other
      store_u32(out, multiply_words(w, f.a));
      if (PLANES == 2) store_u32(out + PLANE_BYTES, multiply_words(w, f.b));
    } else {
      const U32x16 low = splat_u32(0x00ff00ffu);
      const U32x16 even = subtract_words(dot_pairs(w, f.a), f.zero);
      const U32x16 odd = subtract_words(dot_pairs(w, f.b), f.zero);
      store_u32(out, merge(low, even, raise_words(odd, 8)));
      store_u32(out + PLANE_BYTES, merge(low, shift_words(even, 8), odd));
    }
  }

  // The minima of groups 2 r and 2 r + 1 as pairs of bf16: rows r and 8 + r of a tile.
  VX_INLINE void unpack_minima(const uint8_t* unit, uint8_t* tile) {
    const U32x16 high = splat_u32(0xffff0000u);
#pragma GCC unroll 8
    for (int r = 0; r < Blocks::GROUPS / 2; ++r) {
      U32x16 four = load_u32(unit + Format::MINIMA + Format::group(2 * r));
      if (Format::NIBBLE_SCALES) four = (four >> 4) & splat_u32(0x0f0f0f0fu);
      const int at = 2 * r % 4;
      const U32x16 first = as_u32(to_f32(byte_of(four, at))), second = as_u32(to_f32(byte_of(four, at + 1)));
      const U32x16 pair = (first >> 16) | (second & high);
      store_u32(tile + r * 64, pair);
      store_u32(tile + 512 + r * 64, pair);
    }
  }

  // Step `step` of 64 columns of the first or the second panel, which comes after it with the same weights.
  // The four sums take turns because each is ready again only after some cycles.
  VX_INLINE void load_tiles(const uint8_t* x, int step, int half, const uint8_t* room) {
    VX_TILE_LOAD(5, x + Panels::QUADS + step * 64, 256);
    if (half == 0) VX_TILE_LOAD(6, room + step * TILE_BYTES, 64);
    if (half == 0 && PLANES == 2) VX_TILE_LOAD(7, room + PLANE_BYTES + step * TILE_BYTES, 64);
  }
  VX_INLINE void multiply_low(int step, int half) {
    if (half == 0 && step == 0) VX_TILE_ZERO(0);
    if (half == 1 && step == 0) VX_TILE_ZERO(2);
    if (half == 0) VX_TILE_DOT("tdpbsud", 0, 5, 6);
    if (half == 1) VX_TILE_DOT("tdpbsud", 2, 5, 6);
  }
  VX_INLINE void multiply_high(int step, int half) {
    if (PLANES == 1) return;
    if (half == 0 && step == 0) VX_TILE_ZERO(1);
    if (half == 1 && step == 0) VX_TILE_ZERO(3);
    if (half == 0 && CUT_SCALES) VX_TILE_DOT("tdpbsud", 1, 5, 7);
    if (half == 0 && !CUT_SCALES) VX_TILE_DOT("tdpbssd", 1, 5, 7);
    if (half == 1 && CUT_SCALES) VX_TILE_DOT("tdpbsud", 3, 5, 7);
    if (half == 1 && !CUT_SCALES) VX_TILE_DOT("tdpbssd", 3, 5, 7);
  }

  // The minima times the sums of a panel's tokens, in tile 4.
  VX_INLINE void multiply_minima(const uint8_t* x, int32_t tokens, const uint8_t* room) {
    VX_TILE_ZERO(4);
    VX_TILE_LOAD(5, x + Panels::QUADS + (size_t)tokens * 256, 64);
    VX_TILE_LOAD(7, room + LOWS, 64);
    VX_TILE_DOT("tdpbf16ps", 4, 5, 7);
  }

  // sums: [half][planes, and with minima their sum][16 tokens][16 rows]
  VX_INLINE void store_second(int32_t* sums) {
    sums += RESULTS * 256;
    VX_TILE_STORE(2, sums, 64);
    if (PLANES == 2) VX_TILE_STORE(3, sums + 256, 64);
    if (MINIMA) VX_TILE_STORE(4, sums + PLANES * 256, 64);
  }

  // v << SHIFT; additions have two ports.
  VX_INLINE I32x16 raised(I32x16 v) {
    if (SHIFT > 3) return v << (int)SHIFT;
    for (int i = 0; i < SHIFT; ++i) v = v + v;
    return v;
  }

  // A quarter of a half's tokens.
  VX_INLINE void add(const UnitProduct& p, const typename Blocks::Scales& scales, int half, int quarter,
                     int32_t tokens, const int32_t* sums) {
    if (tokens == 16)
      add_tokens<4>(p, scales, half, quarter * 4, tokens, sums);
    else if (tokens == 12)
      add_tokens<3>(p, scales, half, quarter * 3, tokens, sums);
    else if (tokens == 8)
      add_tokens<2>(p, scales, half, quarter * 2, tokens, sums);
    else
      add_tokens<1>(p, scales, half, quarter, tokens, sums);
  }
  template <int COUNT>
  VX_INLINE void add_tokens(const UnitProduct& p, const typename Blocks::Scales& scales, int half, int first,
                            int32_t tokens, const int32_t* sums) {
    const uint8_t* factors = p.x[half] + first * (int)Panels::FACTORS;
    sums += half * RESULTS * 256 + first * 16;
    float* c = p.c + (half * tokens + first) * 32;
#pragma GCC unroll 4
    for (int t = 0; t < COUNT; ++t) {
      I32x16 total = load_i32(sums + t * 16);
      if (PLANES == 2) total = total + raised(load_i32(sums + 256 + t * 16));
      const F32x16 low = load((const float*)sums + PLANES * 256 + t * 16);
      store(c + t * 32, Blocks::add(load(c + t * 32), total, low, scales, factors + t * (int)Panels::FACTORS));
    }
  }
};

}  // namespace VX_ISA
}  // namespace vx
