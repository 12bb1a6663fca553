// Where things lie in a packed block of 16 rows of a quantised matrix; see block_kinds.h. Everything
// that a kernel loads as a whole vector of 64 bytes is 16 lanes of four bytes, one lane a row.
#pragma once
#include "ops.h"

namespace vx {
namespace layout {

// 32 columns a unit: all codes (BITS is 8 or 4), then all scales, so that codes stay aligned.
// codes of unit u: vectors of quads; scale of unit u: float16 x 16.
template <int BITS>
struct Scaled {
  enum { CODE_BYTES = 64 * BITS, UNIT_BYTES = CODE_BYTES + 32 };
  static size_t codes(int32_t u) { return (size_t)u * CODE_BYTES; }
  static size_t scale(int32_t u, int32_t units) { return (size_t)units * CODE_BYTES + (size_t)u * 32; }
};

// 256 columns a unit in 8 groups: float16 x 16 of scales | of scales of the minima | two vectors of
// group scales, a byte for each of four groups | two of minima | nibbles | fifth bits (bit j: quad j).
template <int BITS>
struct Minima {
  enum {
    SCALES = 64, MINIMA = 192, NIBBLES = 320, FIFTH_BITS = NIBBLES + 2048,
    UNIT_BYTES = FIFTH_BITS + (BITS == 5 ? 512 : 0),
  };
  static size_t nibbles(int g) { return NIBBLES + (size_t)g * 256; }
  static size_t fifth_bits(int g) { return FIFTH_BITS + (size_t)g * 64; }
};

// 256 columns a unit in 16 groups: nibbles | pairs of high bits (bits 2j: quad j of four) | four
// vectors of signed group scales, a byte for each of four groups | float16 x 16 | 32 bytes unused.
struct Signed6 {
  enum { HIGH = 2048, SCALES = HIGH + 1024, SCALE = SCALES + 256, UNIT_BYTES = SCALE + 64 };
  static size_t nibbles(int g) { return (size_t)g * 256; }
  static size_t high_pairs(int g) { return HIGH + (size_t)g * 128; }
};

// Bytes of a unit of 16 rows, and its columns; 0 for a kind that is not quantised.
static inline size_t unit_bytes(int32_t kind) {
  switch (kind) {
    case VX_Q8_0: return Scaled<8>::UNIT_BYTES;
    case VX_Q4_0: return Scaled<4>::UNIT_BYTES;
    case VX_Q4_K: return Minima<4>::UNIT_BYTES;
    case VX_Q5_K: return Minima<5>::UNIT_BYTES;
    case VX_Q6_K: return Signed6::UNIT_BYTES;
  }
  return 0;
}
static inline int32_t unit_cols(int32_t kind) { return kind == VX_Q8_0 || kind == VX_Q4_0 ? 32 : 256; }

}  // namespace layout
}  // namespace vx
