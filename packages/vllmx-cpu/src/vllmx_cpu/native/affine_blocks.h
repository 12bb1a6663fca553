// Weights (code - zero) * scale with a scale and a zero for 32, 64 or 128 columns of a row (GPTQ, AWQ,
// int8), multiplied as they are with activations rounded to int8 over the same columns.
#pragma once
#include "int8.h"
#include "load_codes.h"

namespace vx {
namespace VX_ISA {

// A token's unit in a panel: float scale | int16 -sum of the quads | int16 0 | in wide units up to a
// multiple of 64 | the quads.
template <class Format_>
struct AffineBlocks {
  typedef Format_ Format;
  enum {
    QUANTISED = 1, UNIT_COLS = Format::UNIT_COLS, UNIT_BYTES = Format::UNIT_BYTES, CODE_BYTES = Format::CODE_BYTES,
    QUADS = UNIT_COLS > 32 ? 64 : 8, PANEL_BYTES = QUADS + UNIT_COLS / 4 * QUAD_BYTES<Format>,
  };

  static void pack_unit(const float* x, uint8_t* out) {
    int32_t sums[UNIT_COLS / 16], total = 0;
    const float scale = quantise<Format>(x, out + QUADS, sums);
    for (int32_t sum : sums) total += sum;
    const int16_t words[2] = {(int16_t)-total, 0};
    __builtin_memcpy(out, &scale, 4);
    __builtin_memcpy(out + 4, words, 4);
  }

  struct Scales { NativeF scale; NativeU zeros; };  // of the rows from `lane` on; zeros in the low words
  VX_INLINE Scales load_scales(const uint8_t* block, int32_t u, int32_t units, int lane = 0) {
    const uint8_t* zeros = block + Format::zero(u, units) + lane * 2;
    return {load_as<NativeF>(block + Format::scale(u, units) + lane * 4),
            load_words_as(Tag<NativeU>(), (const uint16_t*)zeros) - CODE_BIAS<Format>};
  }

  // As in ScaledBlocks.
  VX_INLINE NativeI start(const uint8_t* x, Scales s) {
    return dot_words(splat_as(Tag<NativeI>(), 0), s.zeros, x + 4);
  }
  VX_INLINE NativeF add(NativeF acc, NativeI sum, Scales s, const uint8_t* x) {
    return fma(s.scale * splat_as(Tag<NativeF>(), read_as<float>(x)), to_f32(sum), acc);
  }

  template <int MB>
  VX_INLINE void multiply(NativeF* acc, const uint8_t* block, int32_t u, int32_t units, int lane,
                          const uint8_t* x) {
    const Scales scales = load_scales(block, u, units, lane);
    NativeI sum[MB];
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t) sum[t] = start(x + (size_t)t * PANEL_BYTES, scales);
#pragma GCC unroll 1
    for (int g = 0; g < UNIT_COLS / 32; ++g) {
      NativeU w[8];
      load_codes<Format>(block + Format::codes(u, g) + lane * 4, w);
      const uint8_t* quads = x + QUADS + g * 8 * QUAD_BYTES<Format>;
      for_groups<MB>([&](auto first, auto count) __attribute__((always_inline)) {
        dot_quads<Format, 8, decltype(count)::value>(sum + first, w, quads + first * PANEL_BYTES, PANEL_BYTES);
      });
    }
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t, x += PANEL_BYTES) acc[t] = add(acc[t], sum[t], scales, x);
  }
};

}  // namespace VX_ISA
}  // namespace vx
