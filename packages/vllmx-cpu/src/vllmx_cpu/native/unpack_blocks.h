// One row out of a packed quantised matrix, as float32: what embedding tables need. The values are
// those of the file to the bit (ggml's order of operations).
#pragma once
#include "block_layout.h"
#include "simd.h"

namespace vx {
namespace VX_ISA {

VX_INLINE float half_at(const uint8_t* p) {
  uint16_t words[16] = {0};
  float lanes[16];
  __builtin_memcpy(words, p, 2);
  store(lanes, load_f16(words));
  return lanes[0];
}

// Code k of the 32 whose vectors begin at p; of a table, its value plus the format's zero.
template <class Format>
VX_INLINE float code_at(const uint8_t* p, int32_t lane, int k) {
  const int code = layout::Codes<Format::BITS>::read(p + lane * 4, k);
  if constexpr (Format::TABLE)
    return (float)(Format::LEVELS[code] - Format::ZERO);
  else
    return (float)(code - Format::ZERO);
}

template <class Format, int UNIT_COLS>
struct UnpackFor {
  static void row(const uint8_t* block, int32_t lane, int32_t units, float* y) {
    for (int32_t u = 0; u < units; ++u) {
      const uint8_t* scales = block + Format::scale(u, units) + lane * 2;
      uint16_t word;
      __builtin_memcpy(&word, scales, 2);
      const float d = Format::SCALE == layout::SCALE_BF16 ? bf16_to_float(word) : half_at(scales);
      for (int k = 0; k < 32; ++k) {
        float value = d * code_at<Format>(block + Format::codes(u), lane, k);
        if constexpr (Format::OFFSET == layout::MINIMUM)
          value = value + half_at(block + Format::minimum(u, units) + lane * 2);
        *y++ = value;
      }
    }
  }
};

template <class Format>
struct UnpackFor<Format, 256> {
  static void row(const uint8_t* block, int32_t lane, int32_t units, float* y) {
    for (int32_t u = 0; u < units; ++u, block += Format::UNIT_BYTES)
      for (int g = 0; g < Format::GROUPS; ++g) {
        const size_t at = Format::group(g) + (size_t)lane * 4 + (size_t)(g % 4);
        const uint8_t s = block[Format::SCALES + at];
        const int signed_or_not = Format::OFFSET != layout::MINIMUM ? (int8_t)s
                                  : Format::NIBBLE_SCALES          ? s & 15
                                                                   : s;
        const float scale = half_at(block + Format::SCALE + lane * 2) * (float)signed_or_not;
        float low = 0;
        if constexpr (Format::OFFSET == layout::MINIMUM) {
          const int m = block[Format::MINIMA + at] >> (Format::NIBBLE_SCALES ? 4 : 0);
          low = half_at(block + Format::SCALE + 32 + lane * 2) * (float)m;
        }
        for (int i = 0; i < Format::GROUP; ++i) {
          const int k = g * Format::GROUP + i;
          const float value = scale * code_at<Format>(block + Format::codes(k / 32), lane, k % 32);
          *y++ = Format::OFFSET == layout::MINIMUM ? value - low : value;
        }
      }
  }
};

// Row `row` of w into y (cols); w.kind is a VxBlockKind.
static void unpack_block_row(const VxWeight* w, int32_t row, float* y) {
  const int32_t units = w->cols / layout::unit_cols(w->kind), lane = row % 16;
  const size_t block_bytes = (size_t)units * layout::unit_bytes(w->kind);
  const uint8_t* block = (const uint8_t*)w->data + (size_t)(row / 16) * block_bytes;
  layout::visit_format(w->kind, 0, [=](auto format) {
    UnpackFor<decltype(format), decltype(format)::UNIT_COLS>::row(block, lane, units, y);
    return 0;
  });
}

}  // namespace VX_ISA
}  // namespace vx
