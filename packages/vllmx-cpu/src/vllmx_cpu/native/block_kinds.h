// Weights in GGUF's block types, multiplied as they are with activations rounded to int8.
//
// A block of 16 rows holds its codes so that a vector is 16 rows of four bytes, one quad of columns.
// Codes of 4 bits share a vector: quad 2j in the low nibbles, quad 2j + 1 in the high ones. `units` are
// 32 columns (one scale a row) or 256 (K types). Packed by pack_blocks.cpp, which see for the offsets.
//
// Every type repeats the exact integer sums of its codes; floats come in once a unit, in one order.
#pragma once
#include "block_layout.h"
#include "int8.h"

namespace vx {
namespace VX_ISA {

VX_INLINE F32x16 load_half(const uint8_t* p) { return load_f16((const uint16_t*)p); }

// --- codes of 32 columns: eight vectors, one a quad -------------------------------------------------
VX_INLINE void load_bytes(const uint8_t* p, U32x16* w) {
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) w[j] = load_u32(p + j * 64);
}
VX_INLINE void load_nibbles(const uint8_t* p, U32x16* w) {
  const U32x16 low = splat_u32(0x0f0f0f0fu);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const U32x16 pair = load_u32(p + j * 64);
    w[2 * j] = pair & low;
    w[2 * j + 1] = (pair >> 4) & low;
  }
}
VX_INLINE void add_fifth_bits(const uint8_t* p, U32x16* w) {
  const U32x16 bits = load_u32(p), sixteen = splat_u32(0x10101010u);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) w[j] = w[j] | ((j < 4 ? bits << (4 - j) : bits >> (j - 4)) & sixteen);
}
VX_INLINE void add_high_pairs(const uint8_t* p, U32x16* w) {
  const U32x16 mask = splat_u32(0x30303030u);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const U32x16 bits = load_u32(p + j / 4 * 64);
    w[j] = w[j] | ((j % 4 < 2 ? bits << (4 - j % 4 * 2) : bits >> (j % 4 * 2 - 4)) & mask);
  }
}
// The i-th byte of each lane, unsigned or signed.
VX_INLINE I32x16 byte_of(U32x16 v, int i) { return as_i32((v >> (8 * i)) & splat_u32(0xff)); }
VX_INLINE I32x16 signed_byte_of(U32x16 v, int i) { return as_i32(v << (24 - 8 * i)) >> 24; }

// --- Q8_0 and Q4_0: 32 columns, scale * (code - ZERO) -----------------------------------------------
// A token's unit in a panel: float scale | int32 -ZERO * sum of the quads | 8 quads.
template <int BITS>
struct Blocks32 {
  typedef layout::Scaled<BITS> Layout;
  enum {
    INT8 = 1, UNIT_COLS = 32, UNIT_BYTES = Layout::UNIT_BYTES, PANEL_BYTES = 8 + 8 * QUAD_BYTES,
    ZERO = 1 << (BITS - 1),
  };

  static void quantise_unit(const float* x, uint8_t* out) {
    int32_t sums[2];
    const float scale = quantise<32>(x, out + 8, sums);
    const int32_t correction = -ZERO * (sums[0] + sums[1]);
    __builtin_memcpy(out, &scale, 4);
    __builtin_memcpy(out + 4, &correction, 4);
  }

  template <int MB>
  VX_INLINE void multiply(F32x16* acc, const uint8_t* block, int32_t u, int32_t units, const uint8_t* x) {
    const F32x16 scale = load_half(block + Layout::scale(u, units));
    U32x16 w[8];
    if (BITS == 8)
      load_bytes(block + Layout::codes(u), w);
    else
      load_nibbles(block + Layout::codes(u), w);
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t, x += PANEL_BYTES) {
      I32x16 sum = splat_i32(read_as<int32_t>(x + 4));
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) sum = dot_bytes(sum, w[j], x + 8 + j * QUAD_BYTES);
      acc[t] = fma(scale * splat(read_as<float>(x)), to_f32(sum), acc[t]);
    }
  }
};

// --- Q4_K and Q5_K: 256 columns, scale * sum of s_g * dot_g - low scale * sum of m_g * sum_g ---------
// A token's unit in a panel: float scale | int16 sums of 8 groups, as two quads 0, 2, 1, 3 | 64 quads.
template <int BITS>
struct BlocksK {
  typedef layout::Minima<BITS> Layout;
  enum {
    INT8 = 1, UNIT_COLS = 256, UNIT_BYTES = Layout::UNIT_BYTES, PANEL_BYTES = 20 + 64 * QUAD_BYTES,
  };

  static void quantise_unit(const float* x, uint8_t* out) {
    int32_t sums[16];
    int16_t groups[8];
    const float scale = quantise<256>(x, out + 20, sums);
    for (int g = 0; g < 8; ++g) {
      const int from = g / 4 * 4 + (g % 4 == 1 ? 2 : g % 4 == 2 ? 1 : g % 4);
      groups[g] = (int16_t)(sums[2 * from] + sums[2 * from + 1]);
    }
    __builtin_memcpy(out, &scale, 4);
    __builtin_memcpy(out + 4, groups, 16);
  }

  template <int MB>
  VX_INLINE void multiply(F32x16* acc, const uint8_t* block, int32_t u, int32_t, const uint8_t* x) {
    const uint8_t* unit = block + (size_t)u * UNIT_BYTES;
    I32x16 total[MB];
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t) total[t] = splat_i32(0);
    for (int g = 0; g < 8; ++g) {
      U32x16 w[8];
      load_nibbles(unit + Layout::nibbles(g), w);
      if (BITS == 5) add_fifth_bits(unit + Layout::fifth_bits(g), w);
      const I32x16 scale = byte_of(load_u32(unit + Layout::SCALES + g / 4 * 64), g % 4);
#pragma GCC unroll 16
      for (int t = 0; t < MB; ++t) {
        const uint8_t* quads = x + (size_t)t * PANEL_BYTES + 20 + g * 8 * QUAD_BYTES;
        I32x16 sum = splat_i32(0);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) sum = dot_bytes(sum, w[j], quads + j * QUAD_BYTES);
        total[t] = total[t] + sum * scale;
      }
    }
    const U32x16 even = splat_u32(0x00ff00ffu);
    const U32x16 low0 = load_u32(unit + Layout::MINIMA), low1 = load_u32(unit + Layout::MINIMA + 64);
    const F32x16 d = load_half(unit), low_d = load_half(unit + 32);
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t, x += PANEL_BYTES) {
      I32x16 low = dot_words(splat_i32(0), low0 & even, x + 4);
      low = dot_words(low, (low0 >> 8) & even, x + 8);
      low = dot_words(low, low1 & even, x + 12);
      low = dot_words(low, (low1 >> 8) & even, x + 16);
      const F32x16 value = d * to_f32(total[t]) - low_d * to_f32(low);
      acc[t] = fma(splat(read_as<float>(x)), value, acc[t]);
    }
  }
};

// --- Q6_K: 256 columns, scale * sum of s_g * (dot_g - 32 sum_g) over 16 groups ----------------------
// A token's unit in a panel: float scale | int32 -32 * sums of 16 groups | 64 quads.
struct BlocksQ6K {
  typedef layout::Signed6 Layout;
  enum {
    INT8 = 1, UNIT_COLS = 256, UNIT_BYTES = Layout::UNIT_BYTES, PANEL_BYTES = 68 + 64 * QUAD_BYTES,
  };

  static void quantise_unit(const float* x, uint8_t* out) {
    int32_t sums[16];
    const float scale = quantise<256>(x, out + 68, sums);
    for (int g = 0; g < 16; ++g) sums[g] *= -32;
    __builtin_memcpy(out, &scale, 4);
    __builtin_memcpy(out + 4, sums, 64);
  }

  template <int MB>
  VX_INLINE void multiply(F32x16* acc, const uint8_t* block, int32_t u, int32_t, const uint8_t* x) {
    const uint8_t* unit = block + (size_t)u * UNIT_BYTES;
    I32x16 total[MB];
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t) total[t] = splat_i32(0);
    for (int g = 0; g < 8; ++g) {
      U32x16 w[8];
      load_nibbles(unit + Layout::nibbles(g), w);
      add_high_pairs(unit + Layout::high_pairs(g), w);
      const U32x16 scales = load_u32(unit + Layout::SCALES + g / 2 * 64) >> (g % 2 * 16);
      const I32x16 first = signed_byte_of(scales, 0), second = signed_byte_of(scales, 1);
#pragma GCC unroll 16
      for (int t = 0; t < MB; ++t) {
        const uint8_t* token = x + (size_t)t * PANEL_BYTES;
        const uint8_t* quads = token + 68 + g * 8 * QUAD_BYTES;
        I32x16 a = splat_i32(read_as<int32_t>(token + 4 + g * 8));
        I32x16 b = splat_i32(read_as<int32_t>(token + 8 + g * 8));
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          a = dot_bytes(a, w[j], quads + j * QUAD_BYTES);
          b = dot_bytes(b, w[j + 4], quads + (j + 4) * QUAD_BYTES);
        }
        total[t] = total[t] + a * first + b * second;
      }
    }
    const F32x16 d = load_half(unit + Layout::SCALE);
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t)
      acc[t] = fma(d * splat(read_as<float>(x + (size_t)t * PANEL_BYTES)), to_f32(total[t]), acc[t]);
  }
};

typedef Blocks32<8> BlocksQ8_0;
typedef Blocks32<4> BlocksQ4_0;
typedef BlocksK<4> BlocksQ4K;
typedef BlocksK<5> BlocksQ5K;

// NR = MICRO_BLOCKS blocks of 16 rows times MB tokens, one block after the other; as `micro`.
template <class Kind, int NR, int MB>
static void micro_blocks(const uint8_t* w, size_t block_bytes, int32_t units, const uint8_t* panel,
                         float* c, const uint8_t* ahead) {
  for (int r = 0; r < NR; ++r, w += block_bytes) {
    F32x16 acc[MB];
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t) acc[t] = zero();
    const uint8_t* x = panel;
    for (int32_t u = 0; u < units; ++u, x += MB * (size_t)Kind::PANEL_BYTES) {
      if (ahead) {
        for (int i = 0; i < Kind::UNIT_BYTES; i += 64) prefetch(ahead + i);
        ahead += Kind::UNIT_BYTES;
      }
      Kind::template multiply<MB>(acc, w, u, units, x);
    }
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t) store(c + t * 32 + r * 16, acc[t]);
  }
}

}  // namespace VX_ISA
}  // namespace vx
