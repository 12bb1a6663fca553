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
#pragma GCC unroll 1
    for (int32_t i = 0; i < lines; ++i, at += 64) __builtin_prefetch(at, 0, 2);
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
    FROM_TOKENS = COLS == 32 ? 13 : 5,
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
    for (; s.count > -3; s.next_four()) {
      if (s.count < count && s.count >= 4)
        s.template run_four<true>();
      else
        s.template run_four<false>();
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

  // Four units at a time, of which `count` are left; `begun` were multiplied before.
  template <int TOKENS, Passing PASSING>
  struct Stage {
    static constexpr bool SIGNED = is_signed(PASSING);
    const uint8_t *tiles, *block, *x;
    int32_t u, count, units;
    int32_t* sums;
    Fetch fetch;
    F32x16 acc[TOKENS];
    int32_t begun = 0;

    // INNER: all four exist, and four before them.
    template <bool INNER>
    VX_MEMBER void run_four() {
      run<0, INNER>();
      run<1, INNER>();
      run<2, INNER>();
      run<3, INNER>();
    }
    VX_MEMBER void next_four() {
      tiles += 4 * TILE_UNIT_BYTES, x += 4 * Panels::unit_bytes(TOKENS), u += 4, count -= 4, begun = 4;
    }

   private:
    // Multiplies unit I in tile I, stores the unit before it, adds the third before it: some of the
    // tokens before and some after each of the others.
    template <int I, bool INNER>
    VX_MEMBER void run() {
      const bool adds = INNER || (begun + I >= 3 && I - 3 < count);
      enum { FROM = (I + 1) % 4 };
      typename Blocks::Scales scales;
      if (adds) {
        scales = Blocks::load_scales(block, u + I - 3, units);
        add<FROM, I - 3, 0, TOKENS / 4>(scales);
      }
      if (INNER || I < count) {
        product<I>(tiles + I * TILE_UNIT_BYTES, unit<I>() + Panels::QUADS);
        if constexpr (PASSING == FEW) fetch.next();
      }
      if (adds) add<FROM, I - 3, TOKENS / 4, TOKENS / 2>(scales);
      if (INNER || (begun + I >= 1 && I - 1 < count)) store_tile<(I + 3) % 4>();
      if (adds) add<FROM, I - 3, TOKENS / 2, TOKENS>(scales);
    }

    template <int I>
    VX_MEMBER const uint8_t* unit() { return x + I * (int64_t)Panels::unit_bytes(TOKENS); }

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

    // The sums of unit UNIT in buffer I, of the tokens from FIRST to LAST - 1.
    template <int I, int UNIT, int FIRST, int LAST>
    VX_MEMBER void add(typename Blocks::Scales scales) {
      const uint8_t* factors = unit<UNIT>();
#pragma GCC unroll 16
      for (int t = FIRST; t < LAST; ++t) {
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
