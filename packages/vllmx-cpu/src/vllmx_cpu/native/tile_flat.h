// Quantised weights with one sum for each unit of 32, 64 or 128 columns, multiplied by AMX tiles: 16
// output rows times a panel of up to 16 tokens. The integer sums are those of ScaledBlocks and
// AffineBlocks, and so are the floats: the bits are the same.
//
// A unit's sums leave the tile through memory and take three floating-point instructions for each token,
// which is the bound (tiles.h: 48 cycles a unit of 32 columns for 16 tokens, where the product takes 16). So
// the float accumulators stay in registers, and the unit whose sums are added was multiplied three units
// before and stored two before.
#pragma once
#include "block_kinds.h"
#include "tile_panels.h"
#include "tiles.h"

namespace vx {
namespace VX_ISA {

#define VX_MEMBER inline __attribute__((always_inline))

// Weights that come next, fetched into the second-level cache a few lines at a time.
struct Fetch {
  const uint8_t *at, *end;
  int32_t lines;

  VX_MEMBER void next() {
    if (at >= end) return;
    for (int32_t i = 0; i < lines; ++i) __builtin_prefetch(at + i * 64, 0, 2);
    at += lines * 64;
  }
};

// How many panels pass by a block's weights. FEW: the weights are read where they lie, as they come from
// memory. MANY: it pays to unpack them, and to make their codes signed so that no sum needs a correction.
enum Passing { FEW, MANY };

template <class Format>
struct FlatTiles : BlockKind<Format> {
  typedef BlockKind<Format> Blocks;
  typedef TilePanels<Blocks> Panels;
  enum {
    COLS = Format::UNIT_COLS, STEPS = COLS == 32 ? 8 : 16, PARTS = COLS / 4 / STEPS,
    SPAN = 1024 / COLS, TILE_UNIT_BYTES = COLS * 16, UNPACKED_BYTES = SPAN * TILE_UNIT_BYTES,
    FROM_TOKENS = COLS == 32 ? 9 : 5,
  };
  static constexpr bool in_place(Passing passing) {
    return Format::BITS == 8 && (passing == FEW || Format::FAMILY != layout::SCALED);
  }
  static constexpr bool is_signed(Passing passing) {
    return Format::FAMILY == layout::SCALED && !in_place(passing);
  }

  // The tiles of `count` units from u on, in `room` or where they are.
  template <Passing PASSING>
  VX_INLINE const uint8_t* unpack(const uint8_t* block, int32_t u, int32_t count, uint8_t* room) {
    const uint8_t* codes = block + Format::codes(u, 0);
    if (in_place(PASSING)) return codes;
    for (int32_t i = 0; i < count * (COLS / 32); ++i, codes += layout::Codes<Format::BITS>::BYTES) {
      U32x16 w[8];
      load_codes<Format>(codes, w);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) store_u32(room + i * 512 + j * 64, less_zero<is_signed(PASSING)>(w[j]));
    }
    return room;
  }

  // Units u ... u + count - 1, unpacked at `tiles`, times a panel's at x. c: [TOKENS][32] accumulators
  // of 16 rows, taken from there first unless u is 0. The tiles are shaped for TOKENS rows.
  template <int TOKENS, Passing PASSING>
  static void multiply(const uint8_t* tiles, const uint8_t* block, int32_t u, int32_t count, int32_t units,
                       const uint8_t* x, float* c, Fetch* fetch) {
    alignas(64) int32_t sums[4][16 * TOKENS];
    Stage<TOKENS, PASSING> s = {tiles, block, x, u, count, units, &sums[0][0], *fetch, {}};
#pragma GCC unroll 16
    for (int t = 0; t < TOKENS; ++t) s.acc[t] = u ? load(c + t * 32) : zero();
    for (int32_t i = 0; i < count + 3; i += 4) {
      s.template run<0>(i);
      s.template run<1>(i + 1);
      s.template run<2>(i + 2);
      s.template run<3>(i + 3);
    }
#pragma GCC unroll 16
    for (int t = 0; t < TOKENS; ++t) store(c + t * 32, s.acc[t]);
    *fetch = s.fetch;
  }

 private:
  template <bool SIGNED>
  VX_INLINE U32x16 less_zero(U32x16 w) {
    if constexpr (SIGNED)
      return (U32x16)_mm512_sub_epi8((__m512i)w, _mm512_set1_epi8((char)Format::ZERO));
    else
      return w;
  }

  template <int TOKENS, Passing PASSING>
  struct Stage {
    static constexpr bool SIGNED = is_signed(PASSING);
    const uint8_t *tiles, *block, *x;
    int32_t first, count, units;
    int32_t* sums;
    Fetch fetch;
    F32x16 acc[TOKENS];

    // Multiplies unit i in tile I = i % 4, stores the unit before it, adds the third before it.
    template <int I>
    VX_MEMBER void run(int32_t i) {
      if (i < count) {
        const uint8_t* w = tiles + (size_t)i * TILE_UNIT_BYTES;
        product<I>(w, unit(i) + Panels::QUADS);
        if constexpr (PASSING == FEW) fetch.next();
      }
      if (i >= 1 && i <= count) store_tile<(I + 3) % 4>();
      if (i >= 3 && i < count + 3) add<(I + 1) % 4>(i - 3);
    }

   private:
    VX_MEMBER const uint8_t* unit(int32_t i) { return x + (size_t)i * Panels::unit_bytes(TOKENS); }

    // Which tiles are meant has to be written in the instruction.
#define VX_PRODUCT(c, a, b)                                          \
  VX_TILE_LOAD(b, w, 64);                                            \
  VX_TILE_LOAD(a, quads, (int)COLS);                                 \
  if (SIGNED) {                                                      \
    VX_TILE_DOT("tdpbssd", c, a, b);                                 \
  } else {                                                           \
    VX_TILE_DOT("tdpbsud", c, a, b);                                 \
  }
    template <int I>
    VX_MEMBER void product(const uint8_t* w, const uint8_t* quads) {
      if constexpr (I == 0) VX_TILE_ZERO(0);
      if constexpr (I == 1) VX_TILE_ZERO(1);
      if constexpr (I == 2) VX_TILE_ZERO(2);
      if constexpr (I == 3) VX_TILE_ZERO(3);
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; ++part, w += TILE_BYTES, quads += 64) {
        if constexpr (I == 0) { VX_PRODUCT(0, 4, 6) }
        if constexpr (I == 1) { VX_PRODUCT(1, 5, 7) }
        if constexpr (I == 2) { VX_PRODUCT(2, 4, 6) }
        if constexpr (I == 3) { VX_PRODUCT(3, 5, 7) }
      }
    }
#undef VX_PRODUCT

    template <int I>
    VX_MEMBER void store_tile() {
      enum { AT = I * TOKENS * 64 };
      if constexpr (I == 0) VX_TILE_STORE_AT(0, sums, AT, 64);
      if constexpr (I == 1) VX_TILE_STORE_AT(1, sums, AT, 64);
      if constexpr (I == 2) VX_TILE_STORE_AT(2, sums, AT, 64);
      if constexpr (I == 3) VX_TILE_STORE_AT(3, sums, AT, 64);
    }

    template <int I>
    VX_MEMBER void add(int32_t i) {
      const uint8_t* factors = unit(i);
      const typename Blocks::Scales scales = Blocks::load_scales(block, first + i, units);
#pragma GCC unroll 16
      for (int t = 0; t < TOKENS; ++t) {
        const uint8_t* token = factors + t * 8;
        I32x16 sum = load_i32(sums + (I * TOKENS + t) * 16);
        if constexpr (!SIGNED) sum = sum + Blocks::start(token, scales);
        acc[t] = Blocks::add(acc[t], sum, scales, token);
      }
    }
  };
};

}  // namespace VX_ISA
}  // namespace vx
