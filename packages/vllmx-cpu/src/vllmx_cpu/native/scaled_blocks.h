// Weights of one scale for each 32 columns, multiplied as they are with activations rounded to int8:
// scale * (code - ZERO), or scale * code + minimum.
#pragma once
#include "int8.h"
#include "load_codes.h"

namespace vx {
namespace VX_ISA {

// A token's unit in a panel: float scale | int32 -ZERO * sum of the quads, or with minima the float
// scale * sum | 8 quads.
template <class Format>
struct ScaledBlocks {
  static constexpr bool MINIMUM = Format::OFFSET == layout::MINIMUM;
  enum {
    QUANTISED = 1, UNIT_COLS = 32, UNIT_BYTES = Format::UNIT_BYTES, QUADS = 8,
    PANEL_BYTES = QUADS + 8 * QUAD_BYTES,
  };

  static void pack_unit(const float* x, uint8_t* out) {
    int32_t sums[2];
    const float scale = quantise<32>(x, out + QUADS, sums);
    const int32_t sum = sums[0] + sums[1], correction = -Format::ZERO * sum;
    const float total = scale * (float)sum;
    __builtin_memcpy(out, &scale, 4);
    __builtin_memcpy(out + 4, MINIMUM ? (const void*)&total : &correction, 4);
  }

  struct Scales { F32x16 scale, minimum; };  // of 16 rows
  VX_INLINE Scales load_scales(const uint8_t* block, int32_t u, int32_t units) {
    const uint8_t* scales = block + Format::scale(u, units);
    return {Format::SCALE == layout::SCALE_BF16 ? load_bf16((const uint16_t*)scales) : load_half(scales),
            MINIMUM ? load_half(block + Format::minimum(u, units)) : zero()};
  }

  // What the sum of products of codes and quads starts with, for the token's unit at x; and what the
  // whole sum adds to the row's accumulator.
  VX_INLINE I32x16 start(const uint8_t* x, Scales) { return splat_i32(MINIMUM ? 0 : read_as<int32_t>(x + 4)); }
  VX_INLINE F32x16 add(F32x16 acc, I32x16 sum, Scales s, const uint8_t* x) {
    acc = fma(s.scale * splat(read_as<float>(x)), to_f32(sum), acc);
    return MINIMUM ? fma(s.minimum, splat(read_as<float>(x + 4)), acc) : acc;
  }

  template <int MB>
  VX_INLINE void multiply(F32x16* acc, const uint8_t* block, int32_t u, int32_t units, const uint8_t* x) {
    const Scales scales = load_scales(block, u, units);
    U32x16 w[8];
    load_codes<Format>(block + Format::codes(u), w);
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t, x += PANEL_BYTES) {
      I32x16 sum = start(x, scales);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) sum = dot_bytes(sum, w[j], x + QUADS + j * QUAD_BYTES);
      acc[t] = add(acc[t], sum, scales, x);
    }
  }
};

}  // namespace VX_ISA
}  // namespace vx
