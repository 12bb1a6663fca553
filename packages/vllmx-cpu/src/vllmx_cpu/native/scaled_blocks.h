// Weights of one scale for each 32 columns, multiplied as they are with activations rounded to int8:
// scale * (code - ZERO), or scale * code + minimum.
#pragma once
#include "int8.h"
#include "load_codes.h"

namespace vx {
namespace VX_ISA {

// A token's unit in a panel: float scale | int32 (CODE_BIAS - ZERO) * sum of the quads, or with minima
// the float scale * sum | 8 quads.
template <class Format_>
struct ScaledBlocks {
  typedef Format_ Format;
  static constexpr bool MINIMUM = Format::OFFSET == layout::MINIMUM;
  enum {
    QUANTISED = 1, UNIT_COLS = 32, UNIT_BYTES = Format::UNIT_BYTES, CODE_BYTES = Format::CODE_BYTES, QUADS = 8,
    PANEL_BYTES = QUADS + 8 * QUAD_BYTES<Format>,
  };

  static void pack_unit(const float* x, uint8_t* out) {
    int32_t sums[2];
    const float scale = quantise<Format>(x, out + QUADS, sums);
    const int32_t sum = sums[0] + sums[1], correction = (CODE_BIAS<Format> - Format::ZERO) * sum;
    const float total = scale * (float)sum;
    __builtin_memcpy(out, &scale, 4);
    __builtin_memcpy(out + 4, MINIMUM ? (const void*)&total : &correction, 4);
  }

  struct Scales { NativeF scale, minimum; };  // of the rows from `lane` on
  VX_INLINE Scales load_scales(const uint8_t* block, int32_t u, int32_t units, int lane = 0) {
    const uint8_t* scales = block + Format::scale(u, units) + lane * 2;
    Scales s;
    if constexpr (Format::SCALE == layout::SCALE_BF16)
      s.scale = as_f32(load_words_as(Tag<NativeU>(), (const uint16_t*)scales) << 16);
    else
      s.scale = load_half(scales);
    if constexpr (MINIMUM) s.minimum = load_half(block + Format::minimum(u, units) + lane * 2);
    return s;
  }

  // What the sum of products of codes and quads starts with, for the token's unit at x; and what the
  // whole sum adds to the row's accumulator.
  VX_INLINE NativeI start(const uint8_t* x, Scales) {
    return splat_as(Tag<NativeI>(), MINIMUM ? 0 : read_as<int32_t>(x + 4));
  }
  VX_INLINE NativeF add(NativeF acc, NativeI sum, Scales s, const uint8_t* x) {
    acc = fma(s.scale * splat_as(Tag<NativeF>(), read_as<float>(x)), to_f32(sum), acc);
    return MINIMUM ? fma(s.minimum, splat_as(Tag<NativeF>(), read_as<float>(x + 4)), acc) : acc;
  }

  template <int MB>
  VX_INLINE void multiply(NativeF* acc, const uint8_t* block, int32_t u, int32_t units, int lane,
                          const uint8_t* x) {
    const Scales scales = load_scales(block, u, units, lane);
    NativeU w[8];
    load_codes<Format>(block + Format::codes(u) + lane * 4, w);
    for_groups<MB>([&](auto first, auto count) __attribute__((always_inline)) {
      constexpr int TOKENS = decltype(count)::value;
      const uint8_t* tokens = x + first * PANEL_BYTES;
      NativeI sum[TOKENS];
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; ++t) sum[t] = start(tokens + t * PANEL_BYTES, scales);
      dot_quads<Format, 8, TOKENS>(sum, w, tokens + QUADS, PANEL_BYTES);
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; ++t)
        acc[first + t] = add(acc[first + t], sum[t], scales, tokens + t * PANEL_BYTES);
    });
  }
};

}  // namespace VX_ISA
}  // namespace vx
