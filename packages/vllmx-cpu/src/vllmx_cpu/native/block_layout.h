// Where things lie in a packed block of 16 rows of a quantised matrix, for each format. Everything
// that a kernel loads as a whole vector of 64 bytes is 16 lanes of four bytes, one lane a row.
#pragma once
#include "ops.h"

namespace vx {
namespace layout {

// 32 codes of 16 rows. A vector is 16 rows of four bytes, one quad of columns; codes of fewer than 8
// bits share it: a plane of B bits holds 8 / B quads a vector, the first in the lowest bits. Codes of
// 3, 5 and 6 bits are a plane of their lower bits and, behind it, one of their higher ones.
template <int BITS>
struct Codes {
  enum {
    LOW = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2, HIGH = BITS - LOW, LOW_BYTES = 64 * LOW, BYTES = 64 * BITS,
  };

  // `lane` points to the row's lane of the first vector.
  static void write(uint8_t* lane, const uint8_t* codes) {
    write_plane<LOW, 0>(lane, codes);
    if constexpr (HIGH > 0) write_plane<HIGH, LOW>(lane + LOW_BYTES, codes);
  }
  static int read(const uint8_t* lane, int k) {
    int code = read_plane<LOW>(lane, k);
    if constexpr (HIGH > 0) code |= read_plane<HIGH>(lane + LOW_BYTES, k) << LOW;
    return code;
  }

 private:
  template <int B>
  static size_t byte(int k) { return (size_t)(k / 4 / (8 / B)) * 64 + (size_t)(k % 4); }
  template <int B>
  static int shift(int k) { return k / 4 % (8 / B) * B; }
  // B bits of each code from bit FROM on: four codes are a word.
  template <int B, int FROM>
  static void write_plane(uint8_t* lane, const uint8_t* codes) {
    constexpr uint32_t mask = 0x01010101u * ((1u << B) - 1);
    for (int quad = 0; quad < 8; lane += 64) {
      uint32_t word = 0, four;
      for (int bit = 0; bit < 8; bit += B, ++quad) {
        __builtin_memcpy(&four, codes + quad * 4, 4);
        word |= (four >> FROM & mask) << bit;
      }
      __builtin_memcpy(lane, &word, 4);
    }
  }
  template <int B>
  static int read_plane(const uint8_t* lane, int k) {
    return lane[byte<B>(k)] >> shift<B>(k) & ((1 << B) - 1);
  }
};

// Which kernel multiplies a format.
enum Family { SCALED, SUPER, AFFINE, FLOAT8 };
// What is taken off a code: a constant, or a float16 minimum that is added to the product.
enum Offset { CONSTANT, MINIMUM };
enum ScaleType { SCALE_F16, SCALE_BF16 };

// WIDE: there are codes above 127.
//
// One scale a unit of 32 columns: all codes, then the scales (and minima) of all units, so that codes
// stay aligned.
template <int BITS_, Offset OFFSET_, int ZERO_ = 0, ScaleType SCALE_ = SCALE_F16>
struct Scaled {
  enum {
    UNIT_COLS = 32, BITS = BITS_, ZERO = ZERO_, TABLE = 0, WIDE = BITS == 8 || ZERO == 128, CODE_BYTES = Codes<BITS>::BYTES,
    TAIL_BYTES = OFFSET_ == MINIMUM ? 64 : 32, UNIT_BYTES = CODE_BYTES + TAIL_BYTES,
  };
  static constexpr Family FAMILY = SCALED;
  static constexpr Offset OFFSET = OFFSET_;
  static constexpr ScaleType SCALE = SCALE_;
  static size_t codes(int32_t u, int = 0) { return (size_t)u * CODE_BYTES; }
  static size_t scale(int32_t u, int32_t units) {
    return (size_t)units * CODE_BYTES + (size_t)u * TAIL_BYTES;
  }
  static size_t minimum(int32_t u, int32_t units) { return scale(u, units) + 32; }
};

// A unit of 256 columns with a scale of one byte for each group: codes | vectors of group scales, a
// byte for each of four groups | as many of group minima | float16 x 16 of scales | of scales of the
// minima. Where a scale has four bits, its minimum is the upper half of the same byte.
template <int BITS_, int GROUP_, Offset OFFSET_, int ZERO_ = 0>
struct Super {
  enum {
    UNIT_COLS = 256, BITS = BITS_, GROUP = GROUP_, GROUPS = 256 / GROUP, ZERO = ZERO_, TABLE = 0,
    NIBBLE_SCALES = 0, WIDE = ZERO == 128,
    SCALES = 8 * Codes<BITS>::BYTES, MINIMA = SCALES + 16 * GROUPS,
    SCALE = MINIMA + (OFFSET_ == MINIMUM ? 16 * GROUPS : 0), UNIT_BYTES = SCALE + 64,
  };
  static constexpr Family FAMILY = SUPER;
  static constexpr Offset OFFSET = OFFSET_;
  static size_t codes(int g) { return (size_t)g * Codes<BITS>::BYTES; }
  static size_t group(int g) { return (size_t)(g / 4) * 64; }  // byte g % 4 of each lane
};

// (code - zero) * scale with both for each unit of a row, as GPTQ, AWQ and int8 have them: the codes
// of all units | their scales, float32 x 16 | their zeros, int16 x 16.
template <int BITS_, int COLS>
struct Affine {
  enum {
    UNIT_COLS = COLS, BITS = BITS_, TABLE = 0, WIDE = BITS == 8,
    CODE_BYTES = COLS / 32 * Codes<BITS>::BYTES, UNIT_BYTES = CODE_BYTES + 64 + 32,
  };
  static constexpr Family FAMILY = AFFINE;
  static size_t codes(int32_t u, int g) { return (size_t)u * CODE_BYTES + (size_t)(g * Codes<BITS>::BYTES); }
  static size_t scale(int32_t u, int32_t units) { return (size_t)units * CODE_BYTES + (size_t)u * 64; }
  static size_t zero(int32_t u, int32_t units) {
    return (size_t)units * (CODE_BYTES + 64) + (size_t)u * 32;
  }
};

// e4m3 with a float32 scale for each unit of a row: the codes of all units | their scales.
struct Float8 {
  enum {
    UNIT_COLS = 128, BITS = 8, TABLE = 0, CODE_BYTES = 4 * Codes<BITS>::BYTES,
    UNIT_BYTES = CODE_BYTES + 64,
  };
  static constexpr Family FAMILY = FLOAT8;
  static size_t codes(int32_t u, int g) { return (size_t)u * CODE_BYTES + (size_t)(g * Codes<BITS>::BYTES); }
  static size_t scale(int32_t u, int32_t units) { return (size_t)units * CODE_BYTES + (size_t)u * 64; }
};

// --- the formats ------------------------------------------------------------------------------------
struct Q8_0 : Scaled<8, CONSTANT, 128> {};
struct Q4_0 : Scaled<4, CONSTANT, 8> {};
struct Q5_0 : Scaled<5, CONSTANT, 16> {};
struct Q4_1 : Scaled<4, MINIMUM> {};
struct Q5_1 : Scaled<5, MINIMUM> {};
struct Q4_K : Super<4, 32, MINIMUM> {};
struct Q5_K : Super<5, 32, MINIMUM> {};
struct Q6_K : Super<6, 16, CONSTANT, 32> {};
struct Q3_K : Super<3, 16, CONSTANT, 4> {};
struct Q2_K : Super<2, 16, MINIMUM> {
  enum { NIBBLE_SCALES = 1, MINIMA = SCALES, SCALE = SCALES + 16 * GROUPS, UNIT_BYTES = SCALE + 64 };
};

// Codes that stand for one of 16 values (TABLE): LEVELS are the values plus ZERO.
struct Iq4Levels {
  static constexpr uint8_t LEVELS[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                         129, 141, 153, 166, 181, 197, 217, 241};
};
struct IQ4_NL : Scaled<4, CONSTANT, 128>, Iq4Levels {
  enum { TABLE = 1 };
};
struct IQ4_XS : Super<4, 32, CONSTANT, 128>, Iq4Levels {
  enum { TABLE = 1 };
};
struct MXFP4 : Scaled<4, CONSTANT, 12, SCALE_BF16> {  // twice the values; the scales are halved
  enum { TABLE = 1 };
  static constexpr uint8_t LEVELS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};

// Calls visit(format) with the format of a VxBlockKind; `otherwise` for any other kind.
template <class Visit, class Result>
static inline Result visit_format(int32_t kind, Result otherwise, Visit visit) {
  switch (kind) {
    case VX_Q4_0: return visit(Q4_0());
    case VX_Q8_0: return visit(Q8_0());
    case VX_Q4_K: return visit(Q4_K());
    case VX_Q5_K: return visit(Q5_K());
    case VX_Q6_K: return visit(Q6_K());
    case VX_Q4_1: return visit(Q4_1());
    case VX_Q5_0: return visit(Q5_0());
    case VX_Q5_1: return visit(Q5_1());
    case VX_Q2_K: return visit(Q2_K());
    case VX_Q3_K: return visit(Q3_K());
    case VX_IQ4_NL: return visit(IQ4_NL());
    case VX_IQ4_XS: return visit(IQ4_XS());
    case VX_MXFP4: return visit(MXFP4());
    case VX_AFFINE4_32: return visit(Affine<4, 32>());
    case VX_AFFINE4_64: return visit(Affine<4, 64>());
    case VX_AFFINE4_128: return visit(Affine<4, 128>());
    case VX_AFFINE8_32: return visit(Affine<8, 32>());
    case VX_AFFINE8_64: return visit(Affine<8, 64>());
    case VX_AFFINE8_128: return visit(Affine<8, 128>());
    case VX_FLOAT8: return visit(Float8());
  }
  return otherwise;
}

// Bytes of a block of 16 rows, and the units in each of its rows; the last unit may be wider than what
// is left of the row. 0 for a kind that is not quantised.
static inline int32_t units_of(int32_t kind, int32_t cols) {
  return visit_format(kind, 0, [=](auto format) {
    const int32_t width = decltype(format)::UNIT_COLS;
    return (cols + width - 1) / width;
  });
}
static inline size_t block_bytes(int32_t kind, int32_t cols) {
  return visit_format(kind, (size_t)0, [=](auto format) {
    return (size_t)units_of(kind, cols) * decltype(format)::UNIT_BYTES;
  });
}

// Where row r of a packed matrix lies: its block, and its lane there. A gated matrix has `features`
// gate rows and as many up rows (product.h tells how they alternate); 0: not gated.
struct Place {
  int32_t block, lane;
};
static inline Place place_of(int32_t r, int32_t features) {
  const int32_t half = features > 0 && r >= features, local = r - half * features;
  return {features > 0 ? local / 16 * 2 + half : r / 16, local % 16};
}

}  // namespace layout
}  // namespace vx
