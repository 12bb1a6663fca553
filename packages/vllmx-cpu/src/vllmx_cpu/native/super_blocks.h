// Weights in units of 256 columns with an integer scale for each group of 16 or 32 columns, multiplied
// as they are with activations rounded to int8. The exact integer sums of a unit come first; floats
// come in once a unit.
#pragma once
#include "int8.h"
#include "load_codes.h"

namespace vx {
namespace VX_ISA {

// The i-th byte of each lane, unsigned or signed.
VX_INLINE NativeI byte_of(NativeU v, int i) { return as_i32((v >> (8 * i)) & 0xff); }
VX_INLINE NativeI signed_byte_of(NativeU v, int i) { return as_i32(v << (24 - 8 * i)) >> 24; }

// With minima: scale * sum of s_g * dot_g - low scale * sum of m_g * sum_g over the groups g;
// without: scale * sum of s_g * (dot_g - ZERO * sum_g), s_g signed.
//
// x86 multiplies 32-bit integers slowly and adds products of 16-bit ones at once. So chains of dot
// products are cut, and their codes centred around 0, so that each sum fits 16 bits; with minima, what
// that took off comes back once a unit.
//
// A token's unit in a panel: float scale | with minima int16 sums of the groups, each four in the order
// 0, 2, 1, 3 | int32 starts of the chains, where they are not 0 | up to a multiple of 64 | 64 quads.
template <class Format>
struct SuperBlocks {
  static constexpr bool MINIMA = Format::OFFSET == layout::MINIMUM;
  enum { GROUPS = Format::GROUPS, PER_32 = GROUPS / 8, GROUP_QUADS = 8 / PER_32, CODES = 1 << Format::BITS };

  // How many quads with codes up to `largest` in magnitude make a sum that fits 16 bits; at most a group.
  static constexpr int fitting(int largest) {
    for (int quads = GROUP_QUADS; quads >= 2; quads /= 2)
      if (largest * 127 * 4 * quads <= 32767) return quads;
    return 0;
  }
#if defined(__x86_64__)
  static constexpr bool CENTRED = MINIMA && fitting(CODES - 1) < GROUP_QUADS;
  static constexpr int FITTING = Format::TABLE ? 0 : fitting(CENTRED || !MINIMA ? CODES / 2 : CODES - 1);
#else
  static constexpr bool CENTRED = false;
  static constexpr int FITTING = 0;
#endif
  static constexpr int CHAIN = FITTING ? FITTING : (int)GROUP_QUADS;  // quads
  static constexpr int CENTRE = CENTRED ? CODES / 2 : Format::ZERO, TAKEN_OFF = CENTRE - CODE_BIAS<Format>;

  enum {
    QUANTISED = 1, UNIT_COLS = 256, UNIT_BYTES = Format::UNIT_BYTES, CODE_BYTES = UNIT_BYTES,
    STARTS = 4 + (MINIMA ? GROUPS * 2 : 0), QUADS = (STARTS + (TAKEN_OFF ? 64 / CHAIN * 4 : 0) + 63) / 64 * 64,
    PANEL_BYTES = QUADS + 64 * QUAD_BYTES<Format>,
  };

  static void pack_unit(const float* x, uint8_t* out) {
    int32_t sums[16];
    const float scale = quantise<Format>(x, out + QUADS, sums);
    __builtin_memcpy(out, &scale, 4);
    for (int g = 0; MINIMA && g < GROUPS; ++g) {
      const int16_t word = (int16_t)(PER_32 == 2 ? sums[g] : sums[2 * g] + sums[2 * g + 1]);
      const int place = g / 4 * 4 + (g % 4 == 1 ? 2 : g % 4 == 2 ? 1 : g % 4);
      __builtin_memcpy(out + 4 + place * 2, &word, 2);
    }
    if constexpr (TAKEN_OFF != 0) {
      constexpr int PARTS = CHAIN < 4 ? CHAIN : CHAIN / 4;  // of a chain: quads, or sums of four
      int32_t of_quads[64], starts[64 / CHAIN];
      if constexpr (CHAIN < 4) sum_quads<Format>(out + QUADS, of_quads);
      const int32_t* parts = CHAIN < 4 ? of_quads : sums;
      for (int i = 0; i < 64 / CHAIN; ++i) {
        int32_t sum = 0;
        for (int j = 0; j < PARTS; ++j) sum += parts[i * PARTS + j];
        starts[i] = -TAKEN_OFF * sum;
      }
      __builtin_memcpy(out + STARTS, starts, sizeof starts);
    }
  }

  template <int MB>
  VX_INLINE void multiply(NativeF* acc, const uint8_t* block, int32_t u, int32_t, int lane, const uint8_t* x) {
    multiply<MB>(acc, block, u, lane, x, [](int) {});
  }
  // Calls beside(part) for 8 parts of the unit.
  template <int MB, class Beside>
  VX_INLINE void multiply(NativeF* acc, const uint8_t* block, int32_t u, int lane, const uint8_t* x, Beside beside) {
    const uint8_t* unit = block + (size_t)u * UNIT_BYTES;
    NativeI total[MB];
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t) total[t] = splat_as(Tag<NativeI>(), 0);
    for (int i = 0; i < 8; ++i) {
      beside(i);
      NativeU w[8];
      load_codes<Format>(unit + Format::codes(i) + lane * 4, w);
#pragma GCC unroll 4
      for (int j = 0; j < 8; j += CHAIN) {
        const NativeI scale = scale_of(unit, i * PER_32 + j / GROUP_QUADS, lane);
        const int chain = (i * 8 + j) / CHAIN;
        for_groups<MB>([&](auto first, auto count) __attribute__((always_inline)) {
          constexpr int TOKENS = decltype(count)::value;
          const uint8_t* tokens = x + first * PANEL_BYTES;
          NativeI sum[TOKENS];
#pragma GCC unroll 4
          for (int t = 0; t < TOKENS; ++t) sum[t] = start(tokens + t * PANEL_BYTES, chain);
          const uint8_t* quads = tokens + QUADS + (i * 8 + j) * QUAD_BYTES<Format>;
          dot_quads<Format, CHAIN, TOKENS>(sum, w + j, quads, PANEL_BYTES);
#pragma GCC unroll 4
          for (int t = 0; t < TOKENS; ++t) total[first + t] = add_scaled(total[first + t], sum[t], scale);
        });
      }
    }
    const Scales scales = load_scales(unit, lane);
    NativeU centred[GROUPS / 2];
    if constexpr (CENTRED) load_bytes(unit + Format::SCALES + lane * 4, 0, centred);
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t, x += PANEL_BYTES) {
      if constexpr (CENTRED) total[t] = total[t] + dot_sums(centred, x) * CENTRE;
      acc[t] = add(acc[t], total[t], scales, x);
    }
  }

  // The floats and the minima of a unit, of the rows from `lane` on.
  struct Scales {
    NativeF d, low_d;
    NativeU minima[MINIMA ? GROUPS / 2 : 1];
  };
  VX_INLINE Scales load_scales(const uint8_t* unit, int lane = 0) {
    Scales s;
    s.d = load_half(unit + Format::SCALE + lane * 2);
    if constexpr (MINIMA) {
      s.low_d = load_half(unit + Format::SCALE + 32 + lane * 2);
      load_bytes(unit + Format::MINIMA + lane * 4, Format::NIBBLE_SCALES ? 4 : 0, s.minima);
    }
    return s;
  }
  // acc and what a unit's sum over the groups adds to it, for the token's unit at x.
  VX_INLINE NativeF add(NativeF acc, NativeI total, const Scales& s, const uint8_t* x) {
    NativeF low;
    if constexpr (MINIMA) low = to_f32(dot_sums(s.minima, x));
    return add(acc, total, low, s, x);
  }
  // The same where the sum of the minima times the token's sums is known.
  VX_INLINE NativeF add(NativeF acc, NativeI total, NativeF low, const Scales& s, const uint8_t* x) {
    const NativeF scale = splat_as(Tag<NativeF>(), read_as<float>(x));
    if constexpr (!MINIMA)
      return fma(s.d * scale, to_f32(total), acc);
    else
      return fma(scale, s.d * to_f32(total) - s.low_d * low, acc);
  }

  // Group scale g of the rows from `lane` on.
  VX_INLINE NativeI scale_of(const uint8_t* unit, int g, int lane = 0) {
    const NativeU four = load_as<NativeU>(unit + Format::SCALES + Format::group(g) + lane * 4);
    if (!MINIMA) return signed_byte_of(four, g % 4);
    return byte_of(Format::NIBBLE_SCALES ? four & 0x0f0f0f0fu : four, g % 4);
  }

  // What the chain of a token's sum begins with, and what the scaled sum adds to a unit's.
  VX_INLINE NativeI start(const uint8_t* token, int chain) {
    return splat_as(Tag<NativeI>(), TAKEN_OFF ? read_as<int32_t>(token + STARTS + chain * 4) : 0);
  }
  VX_INLINE NativeI add_scaled(NativeI total, NativeI sum, NativeI scale) {
    if constexpr (FITTING == 0) return total + sum * scale;
    return dot_word_pairs(total, as_u32(sum), as_u32(scale) & 0xffff);
  }
  // Bytes of all groups, a vector of four each 64 bytes, as pairs of words in the order of the sums.
  VX_INLINE void load_bytes(const uint8_t* p, int shift, NativeU* pairs) {
#pragma GCC unroll 4
    for (int i = 0; i < GROUPS / 4; ++i) {
      NativeU four = load_as<NativeU>(p + i * 64);
      if (shift) four = (four >> shift) & 0x0f0f0f0fu;
      pairs[2 * i] = four & 0x00ff00ffu;
      pairs[2 * i + 1] = (four >> 8) & 0x00ff00ffu;
    }
  }
  // The sum over the groups of such bytes times the token's sums.
  VX_INLINE NativeI dot_sums(const NativeU* pairs, const uint8_t* x) {
    NativeI sum = splat_as(Tag<NativeI>(), 0);
#pragma GCC unroll 8
    for (int i = 0; i < GROUPS / 2; ++i) sum = dot_words(sum, pairs[i], x + 4 + i * 4);
    return sum;
  }
};

}  // namespace VX_ISA
}  // namespace vx
