// The inner loop of `linear` for units of 256 columns that are multiplied by VNNI, and many tokens: two
// blocks of 16 rows share each broadcast of a quad, and a unit's codes and scales are unpacked once for
// all tokens of a panel. The integer sums and the order of the floats are those of SuperBlocks::multiply.
// 3300 vector instructions for two units of Q4_K and 32 tokens, on two ports; 2048 are the dot products.
#pragma once
#include "micro_pairs.h"
#include "super_blocks.h"

namespace vx {
namespace VX_ISA {

template <class Format>
struct SuperPairs {
  typedef SuperBlocks<Format> Blocks;
  // Tokens of a panel at most, of which so many are multiplied at a time: with six the sums and totals would
  // fit the registers too, but that was slower. For fewer than FROM_TOKENS one block at a time is as fast.
  enum { TOKENS = 32, TOGETHER = 4, FROM_TOKENS = 13 };

  // A unit of both blocks.
  struct Unit {
    NativeU codes[2][64];
    NativeI scales[2][Blocks::GROUPS];
    typename Blocks::Scales factors[2];
    NativeU centred[2][Blocks::GROUPS / 2];

    inline __attribute__((always_inline)) void unpack(const uint8_t* first, size_t block_bytes) {
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) {
        const uint8_t* unit = first + r * block_bytes;
#pragma GCC unroll 1
        for (int i = 0; i < 8; ++i) {
          NativeU w[8];
          load_codes<Format>(unit + Format::codes(i), w);
#pragma GCC unroll 8
          for (int j = 0; j < 8; ++j) codes[r][i * 8 + j] = w[j];
        }
#pragma GCC unroll 16
        for (int g = 0; g < Blocks::GROUPS; ++g) scales[r][g] = Blocks::scale_of(unit, g);
        factors[r] = Blocks::load_scales(unit);
        if constexpr (Blocks::CENTRED) Blocks::load_bytes(unit + Format::SCALES, 0, centred[r]);
      }
    }
  };

  // c: [tokens][32] += a unit times the tokens whose units are at x.
  template <int COUNT>
  VX_INLINE void multiply(const Unit& unit, const uint8_t* x, float* c) {
    NativeI total[2][COUNT];
#pragma GCC unroll 8
    for (int t = 0; t < COUNT; ++t) total[0][t] = total[1][t] = splat_as(Tag<NativeI>(), 0);
#pragma GCC unroll 1
    for (int i = 0; i < 64; i += Blocks::CHAIN) {
      NativeI sum[2][COUNT];
#pragma GCC unroll 8
      for (int t = 0; t < COUNT; ++t)
        for (int r = 0; r < 2; ++r) sum[r][t] = Blocks::start(x + t * Blocks::PANEL_BYTES, i / Blocks::CHAIN);
#pragma GCC unroll 8
      for (int j = i; j < i + Blocks::CHAIN; ++j)
#pragma GCC unroll 8
        for (int t = 0; t < COUNT; ++t) {
          const uint8_t* quads = x + t * Blocks::PANEL_BYTES + Blocks::QUADS;
          __m512i quad = _mm512_set1_epi32(read_as<int32_t>(quads + j * 4));
          __asm__("" : "+v"(quad));  // one load for both, not an operand of each
#pragma GCC unroll 2
          for (int r = 0; r < 2; ++r)
            sum[r][t] = (NativeI)_mm512_dpbusd_epi32((__m512i)sum[r][t], (__m512i)unit.codes[r][j], quad);
        }
#pragma GCC unroll 8
      for (int t = 0; t < COUNT; ++t)
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r)
          total[r][t] = Blocks::add_scaled(total[r][t], sum[r][t], unit.scales[r][i / Blocks::GROUP_QUADS]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < COUNT; ++t, x += Blocks::PANEL_BYTES, c += 32)
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) {
        if constexpr (Blocks::CENTRED)
          total[r][t] = total[r][t] + Blocks::dot_sums(unit.centred[r], x) * Blocks::CENTRE;
        store(c + r * 16, Blocks::add(load(c + r * 16), total[r][t], unit.factors[r], x));
      }
  }

  template <int COUNT = 1>
  VX_INLINE void multiply_some(int32_t count, const Unit& unit, const uint8_t* x, float* c) {
    if constexpr (COUNT < TOGETHER)
      if (count > COUNT) return multiply_some<COUNT + 1>(count, unit, x, c);
    multiply<COUNT>(unit, x, c);
  }

  // The two blocks at w times a panel of `tokens` tokens: c becomes [tokens][32] sums. `next`: the blocks
  // to fetch meanwhile, or null.
  static void run(const uint8_t* w, size_t block_bytes, int32_t units, const uint8_t* x, int32_t tokens,
                  float* c, const uint8_t* next) {
    const int32_t groups = (tokens + TOGETHER - 1) / TOGETHER;
    const int32_t lines = (2 * Blocks::UNIT_BYTES / 64 + groups - 1) / groups;  // to fetch beside each
    Unit unit;
    for (int32_t i = 0; i < tokens * 32; i += 16) store(c + i, zero());
    for (int32_t u = 0; u < units; ++u, w += Blocks::UNIT_BYTES) {
      unit.unpack(w, block_bytes);
      for (int32_t i = 0, t = 0; i < groups; ++i) {
        for (int32_t line = 0; next && line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
        const int32_t count = (tokens - t + groups - i - 1) / (groups - i);
        multiply_some(count, unit, x, c + t * 32);
        t += count, x += count * (int)Blocks::PANEL_BYTES;
      }
    }
  }
};

}  // namespace VX_ISA
}  // namespace vx
