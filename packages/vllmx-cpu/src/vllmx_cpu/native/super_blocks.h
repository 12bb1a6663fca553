// Weights in units of 256 columns with an integer scale for each group of 16 or 32 columns, multiplied
// as they are with activations rounded to int8. The exact integer sums of a unit come first; floats
// come in once a unit.
#pragma once
#include "int8.h"
#include "load_codes.h"

namespace vx {
namespace VX_ISA {

// The i-th byte of each lane, unsigned or signed.
VX_INLINE I32x16 byte_of(U32x16 v, int i) { return as_i32((v >> (8 * i)) & splat_u32(0xff)); }
VX_INLINE I32x16 signed_byte_of(U32x16 v, int i) { return as_i32(v << (24 - 8 * i)) >> 24; }

// With minima: scale * sum of s_g * dot_g - low scale * sum of m_g * sum_g over the groups g;
// without: scale * sum of s_g * (dot_g - ZERO * sum_g), s_g signed.
// A token's unit in a panel: float scale | with minima int16 sums of the groups, each four in the order
// 0, 2, 1, 3, else int32 -ZERO * sums | up to a multiple of 64 | 64 quads.
template <class Format>
struct SuperBlocks {
  static constexpr bool MINIMA = Format::OFFSET == layout::MINIMUM;
  enum {
    QUANTISED = 1, UNIT_COLS = 256, UNIT_BYTES = Format::UNIT_BYTES, GROUPS = Format::GROUPS,
    PER_32 = GROUPS / 8, QUADS = (4 + GROUPS * (MINIMA ? 2 : 4) + 63) / 64 * 64,
    PANEL_BYTES = QUADS + 64 * QUAD_BYTES,
  };

  static void pack_unit(const float* x, uint8_t* out) {
    int32_t sums[16];
    const float scale = quantise<256>(x, out + QUADS, sums);
    __builtin_memcpy(out, &scale, 4);
    for (int g = 0; g < GROUPS; ++g) {
      const int32_t sum = PER_32 == 2 ? sums[g] : sums[2 * g] + sums[2 * g + 1];
      const int32_t correction = -Format::ZERO * sum;
      const int16_t word = (int16_t)sum;
      const int place = g / 4 * 4 + (g % 4 == 1 ? 2 : g % 4 == 2 ? 1 : g % 4);
      if (MINIMA)
        __builtin_memcpy(out + 4 + place * 2, &word, 2);
      else
        __builtin_memcpy(out + 4 + g * 4, &correction, 4);
    }
  }

  template <int MB>
  VX_INLINE void multiply(F32x16* acc, const uint8_t* block, int32_t u, int32_t, const uint8_t* x) {
    const uint8_t* unit = block + (size_t)u * UNIT_BYTES;
    I32x16 total[MB];
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t) total[t] = splat_i32(0);
    for (int i = 0; i < 8; ++i) {
      U32x16 w[8];
      load_codes<Format>(unit + Format::codes(i), w);
      const I32x16 first = scale_of(unit, i * PER_32), second = scale_of(unit, i * PER_32 + PER_32 - 1);
#pragma GCC unroll 16
      for (int t = 0; t < MB; ++t) {
        const uint8_t* token = x + (size_t)t * PANEL_BYTES;
        const uint8_t* quads = token + QUADS + i * 8 * QUAD_BYTES;
        I32x16 a = start(token, i * PER_32), b = start(token, i * PER_32 + PER_32 - 1);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
          I32x16& sum = PER_32 == 2 && j >= 4 ? b : a;
          sum = dot_bytes(sum, w[j], quads + j * QUAD_BYTES);
        }
        total[t] = total[t] + a * first;
        if constexpr (PER_32 == 2) total[t] = total[t] + b * second;
      }
    }
    const Scales scales = load_scales(unit);
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t, x += PANEL_BYTES) acc[t] = add(acc[t], total[t], scales, x);
  }

  // The floats and the minima of a unit of 16 rows.
  struct Scales {
    F32x16 d, low_d;
    U32x16 minima[MINIMA ? GROUPS / 2 : 1];
  };
  VX_INLINE Scales load_scales(const uint8_t* unit) {
    Scales s;
    s.d = load_half(unit + Format::SCALE);
    if constexpr (MINIMA) {
      s.low_d = load_half(unit + Format::SCALE + 32);
#pragma GCC unroll 4
      for (int i = 0; i < GROUPS / 4; ++i) {
        U32x16 four = load_u32(unit + Format::MINIMA + i * 64);
        if (Format::NIBBLE_SCALES) four = (four >> 4) & splat_u32(0x0f0f0f0fu);
        s.minima[2 * i] = four & splat_u32(0x00ff00ffu);
        s.minima[2 * i + 1] = (four >> 8) & splat_u32(0x00ff00ffu);
      }
    }
    return s;
  }
  // acc and what a unit's sum over the groups adds to it, for the token's unit at x.
  VX_INLINE F32x16 add(F32x16 acc, I32x16 total, const Scales& s, const uint8_t* x) {
    if constexpr (!MINIMA) {
      return fma(s.d * splat(read_as<float>(x)), to_f32(total), acc);
    } else {
      I32x16 low = splat_i32(0);
#pragma GCC unroll 8
      for (int i = 0; i < GROUPS / 2; ++i) low = dot_words(low, s.minima[i], x + 4 + i * 4);
      return fma(splat(read_as<float>(x)), s.d * to_f32(total) - s.low_d * to_f32(low), acc);
    }
  }

  // Group scale g of 16 rows.
  VX_INLINE I32x16 scale_of(const uint8_t* unit, int g) {
    const U32x16 four = load_u32(unit + Format::SCALES + Format::group(g));
    if (!MINIMA) return signed_byte_of(four, g % 4);
    return byte_of(Format::NIBBLE_SCALES ? four & splat_u32(0x0f0f0f0fu) : four, g % 4);
  }

 private:
  VX_INLINE I32x16 start(const uint8_t* token, int g) {
    return splat_i32(MINIMA ? 0 : read_as<int32_t>(token + 4 + g * 4));
  }
};

}  // namespace VX_ISA
}  // namespace vx
