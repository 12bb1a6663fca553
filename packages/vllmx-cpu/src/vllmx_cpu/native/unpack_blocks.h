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

// Row `lane` of a block of `units` units into y (cols).
template <class Format, layout::Family FAMILY>
struct UnpackFor;

template <class Format>
struct UnpackFor<Format, layout::SCALED> {
  static void row(const uint8_t* block, int32_t lane, int32_t units, int32_t, float* y) {
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
struct UnpackFor<Format, layout::SUPER> {
  static void row(const uint8_t* block, int32_t lane, int32_t units, int32_t, float* y) {
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

template <class Format>
struct UnpackFor<Format, layout::AFFINE> {
  static void row(const uint8_t* block, int32_t lane, int32_t units, int32_t cols, float* y) {
    for (int32_t k = 0; k < cols; ++k) {
      const int32_t u = k / Format::UNIT_COLS, g = k % Format::UNIT_COLS / 32;
      const uint8_t* codes = block + Format::codes(u, g) + lane * 4;
      const int code = layout::Codes<Format::BITS>::read(codes, k % 32);
      const float scale = ((const float*)(block + Format::scale(u, units)))[lane];
      y[k] = (float)(code - ((const int16_t*)(block + Format::zero(u, units)))[lane]) * scale;
    }
  }
};

template <class Format>
struct UnpackFor<Format, layout::FLOAT8> {
  static void row(const uint8_t* block, int32_t lane, int32_t units, int32_t cols, float* y) {
    for (int32_t k = 0; k < cols; ++k) {
      const int32_t u = k / Format::UNIT_COLS, g = k % Format::UNIT_COLS / 32;
      const int code = layout::Codes<8>::read(block + Format::codes(u, g) + lane * 4, k % 32);
      const int exponent = code >> 3 & 15, mantissa = (code & 7) + (exponent ? 8 : 0);
      const float scale = ((const float*)(block + Format::scale(u, units)))[lane];
      const float power = bf16_to_float((uint16_t)((117 + (exponent ? exponent : 1)) << 7));  // 2^(e - 10)
      y[k] = (float)(code & 128 ? -mantissa : mantissa) * power * scale;
    }
  }
};

// Row `row` of w into y (cols); w.kind is a VxBlockKind, its columns are in order.
static void unpack_block_row(const VxWeight* w, int32_t row, float* y) {
  const int32_t units = layout::units_of(w->kind, w->cols), lane = row % 16, cols = w->cols;
  const uint8_t* block = (const uint8_t*)w->data + (size_t)(row / 16) * layout::block_bytes(w->kind, cols);
  layout::visit_format(w->kind, 0, [=](auto format) {
    typedef decltype(format) Format;
    UnpackFor<Format, Format::FAMILY>::row(block, lane, units, cols, y);
    return 0;
  });
}

}  // namespace VX_ISA
}  // namespace vx
