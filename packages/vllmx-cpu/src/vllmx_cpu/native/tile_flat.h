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

  // Units u ... u + count - 1 of a block, unpacked at `tiles`, times a panel's from x on, into the
  // accumulators at c: [TOKENS][32] of 16 rows, which start at zero where u is 0.
  struct UnitProduct {
    const uint8_t *tiles, *block, *x;
    int32_t u, count;
    float* c;
  };

  // Multiplies `now`. The sums of its last four units are left in tiles and in `sums`, [4][16 * TOKENS],
  // to be added by the next product: `before` is in and out those four, none (count 0) at the start. A
  // product without units does no more than that. The tiles are shaped for TOKENS rows.
  template <int TOKENS, Passing PASSING>
  static __attribute__((noinline)) void multiply(const UnitProduct& now, UnitProduct* before, int32_t units, int32_t* sums,
                                                 Fetch* fetch) {
    Stage<TOKENS, PASSING> s = {now, *before, units, sums, *fetch, {}};
    s.load_sums(before->c);
    bool first = true, switches = now.u == 0 || now.c != before->c;
    for (;; s.next_four()) {
      if (first || s.now.count < 4)
        s.template run_four<false>(switches);
      else
        s.template run_four<true>(false);
      if (s.now.count <= 4) break;
      first = switches = false;
    }
    s.store_sums(now.c);
    *fetch = s.fetch, *before = s.now;
  }

 private:
  template <bool SIGNED>
  VX_INLINE U32x16 less_zero(U32x16 w) {
    if constexpr (SIGNED)
      return (U32x16)_mm512_sub_epi8((__m512i)w, _mm512_set1_epi8((char)Format::ZERO));
    else
      return w;
  }

  // Four units at a time, the first of `now`, and the four before them, or as many as there are.
  template <int TOKENS, Passing PASSING>
  struct Stage {
    static constexpr bool SIGNED = is_signed(PASSING);
    UnitProduct now, before;
    int32_t units;
    int32_t* sums;
    Fetch fetch;
    F32x16 acc[TOKENS];

    VX_MEMBER void load_sums(const float* c) {
#pragma GCC unroll 16
      for (int t = 0; t < TOKENS; ++t) acc[t] = load(c + t * 32);
    }
    VX_MEMBER void store_sums(float* c) {
#pragma GCC unroll 16
      for (int t = 0; t < TOKENS; ++t) store(c + t * 32, acc[t]);
    }
    VX_MEMBER void next_four() {
      before = now;
      now.tiles += 4 * TILE_UNIT_BYTES, now.x += 4 * Panels::unit_bytes(TOKENS), now.u += 4, now.count -= 4;
    }

    // INNER: all of these four exist, and of those before them. SWITCHES: those before are another
    // product's, whose accumulators are complete with its last unit.
    template <bool INNER>
    VX_MEMBER void run_four(bool switches) {
      run<0, INNER>();
      run<1, INNER>();
      run<2, INNER>();
      if (!INNER && switches) {
        store_sums(before.c);
        if (now.u == 0) {
#pragma GCC unroll 16
          for (int t = 0; t < TOKENS; ++t) acc[t] = zero();
        } else {
          load_sums(now.c);
        }
      }
      run<3, INNER>();
    }

   private:
    // Multiplies unit I in tile I, stores the unit before it, adds the third before it: some of the
    // tokens before and some after each of the others.
    template <int I, bool INNER>
    VX_MEMBER void run() {
      enum { FROM = (I + 1) % 4 };
      const UnitProduct& from = I < 3 ? before : now;  // of the unit that is added
      const bool adds = INNER || FROM < from.count;
      typename Blocks::Scales scales;
      if (adds) {
        scales = Blocks::load_scales(from.block, from.u + FROM, units);
        add<FROM, 0, TOKENS / 4>(scales, from.x);
      }
      if (INNER || I < now.count) {
        product<I>(now.tiles + I * TILE_UNIT_BYTES, unit<I>(now.x) + Panels::QUADS);
        if constexpr (PASSING == FEW) fetch.next();
      }
      if (adds) add<FROM, TOKENS / 4, TOKENS / 2>(scales, from.x);
      if (INNER || (I > 0 ? I - 1 < now.count : 3 < before.count)) store_tile<(I + 3) % 4>();
      if (adds) add<FROM, TOKENS / 2, TOKENS>(scales, from.x);
    }

    template <int I>
    VX_MEMBER const uint8_t* unit(const uint8_t* x) { return x + I * (int64_t)Panels::unit_bytes(TOKENS); }

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

    // The sums of unit I of the four at x, of the tokens from FIRST to LAST - 1.
    template <int I, int FIRST, int LAST>
    VX_MEMBER void add(typename Blocks::Scales scales, const uint8_t* x) {
      const uint8_t* factors = unit<I>(x);
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
