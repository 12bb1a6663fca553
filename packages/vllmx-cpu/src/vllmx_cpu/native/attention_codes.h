// KV pages of codes of 8 and 4 bits: what a vector is rounded to, and how a chunk becomes bf16 again.
//
// vllmx_core/kv_dtypes.py has the rule. A group holds 32 codes for each vector of bf16 cells that is made
// of them, then a float scale for each of its 16 positions:
//   K group  [D / 2][2 features][16 positions]          scales [16 positions]
//   V group  [8][Dp / 16][2 positions][16 features]     scales [16 positions]
// A byte of 4-bit codes holds two of one token, so that threads never write the same byte:
//   K group  [D / 2][16 positions]                      features 2i and, in the upper half, 2i + 1
//   V group  [8][D / 16][2 positions][8]                features j and, in the upper half, j + 8
// Where codes are `interleaved` the two of a cell lie side by side, [16][2] instead of [2][16]: before
// VBMI nothing brings bytes of other lanes together.
// Every code is exact in bf16, so codes are widened into scratch once for all query heads of a unit and
// multiplied as bf16 pages are; the scales go to the scores and to the probabilities.
#pragma once
#include "attention_pages.h"

namespace vx {
namespace VX_ISA {

struct Int8Code {
  static constexpr int per_byte = 1;
  static constexpr float limit = 127.0f;
  static constexpr float unit = 1.0f;  // of what `widen` makes of codes
  static constexpr bool interleaved = false, by_two = false;
  VX_INLINE F32x16 load(const uint8_t* codes) { return to_f32(load_i8((const int8_t*)codes)); }
  VX_INLINE U32x16 encode(F32x16 v) { return as_u32(to_i32(v)); }
};

// A byte of e4m3 is a half but for the bias of its exponent: what becomes of it is the value / 256.
// 0x7f, which only a page that was never written holds, is 480 / 256.
struct Fp8Code {
  static constexpr int per_byte = 1;
  static constexpr float limit = 448.0f;
  static constexpr float unit = 256.0f;
#if VX_NATIVE_BYTES == 64
  static constexpr bool by_two = true;
  // Byte by byte, 64 codes into two vectors of cells. The upper byte of a bf16 has the sign and the
  // exponent's upper bits, as the code's upper four bits have; the lower byte has what the lower four
  // have. Denormal codes come from tables.
  VX_INLINE void widen_twice(const uint8_t* codes, uint32_t* out) {
    const __m512i upper_bytes = bytes_of(0x38, 0x39, 0x3a, 0x3b, 0x3c, 0x3d, 0x3e, 0x3f, 0xb8, 0xb9, 0xba,
                                         0xbb, 0xbc, 0xbd, 0xbe, 0xbf);
    const __m512i denormal_upper = bytes_of(0, 0x37, 0x37, 0x37, 0x38, 0x38, 0x38, 0x38);
    const __m512i denormal_lower = bytes_of(0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60);
    const __m512i four = _mm512_set1_epi8(15), sign = _mm512_set1_epi8((char)0x80);
    const __m512i c = in_order(_mm512_loadu_si512(codes));
    const __m512i low = _mm512_and_si512(c, four), high = _mm512_and_si512(_mm512_srli_epi16(c, 4), four);
    const __mmask64 denormal = _mm512_testn_epi8_mask(c, _mm512_set1_epi8(0x78));
    __m512i upper = _mm512_shuffle_epi8(upper_bytes, high), lower = _mm512_slli_epi16(low, 4);
    upper = _mm512_mask_shuffle_epi8(upper, denormal, denormal_upper, low);
    lower = _mm512_mask_shuffle_epi8(lower, denormal, denormal_lower, low);
    upper = _mm512_ternarylogic_epi64(upper, c, sign, 0xf8);  // upper | (c & sign)
    _mm512_storeu_si512(out, _mm512_unpacklo_epi8(lower, upper));
    _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi8(lower, upper));
  }
  // The codes of four cells of one vector and of the other in each 128 bits, as `unpack` wants them.
#if defined(__AVX512VBMI__)
  static constexpr bool interleaved = false;
  VX_INLINE __m512i in_order(__m512i codes) {
    const __m512i first = bytes_of(0, 16, 1, 17, 2, 18, 3, 19, 32, 48, 33, 49, 34, 50, 35, 51);
    const __m512i cells = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    return _mm512_permutexvar_epi8(_mm512_add_epi8(first, _mm512_shuffle_epi8(cells, _mm512_setzero_si512())), codes);
  }
#else
  static constexpr bool interleaved = true;
  // 16 codes to bytes 0, 2 ... 30.
  VX_INLINE void store_every_second(const uint8_t* codes, uint8_t* out) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)codes));
    _mm256_mask_storeu_epi8(out, 0x55555555, words);
  }
  VX_INLINE __m512i in_order(__m512i codes) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
  }
#endif
  template <class... B>
  VX_INLINE __m512i bytes_of(B... b) {
    alignas(16) const uint8_t bytes[16] = {(uint8_t)b...};
    return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)bytes));
  }
#else
  static constexpr bool interleaved = false, by_two = false;
  VX_INLINE F32x16 load(const uint8_t* codes) {
#if VX_NATIVE_BYTES == 32
    __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes));
    words = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16((short)0xbf80));
    return {(NativeF)_mm256_cvtph_ps(_mm256_castsi256_si128(words)),
            (NativeF)_mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
#else
    const U32x16 bits = as_u32(load_i8((const int8_t*)codes));
    const F32x16 magnitude = as_f32((bits & splat_u32(0x7f)) << 20) * splat(0x1p112f);
    return as_f32(as_u32(magnitude) | (bits & splat_u32(0x80000000u)));
#endif
  }
#endif
  // Nearest, ties to even, for |v| up to 448 and a rounding error.
  VX_INLINE U32x16 encode(F32x16 v) {
    const U32x16 bits = as_u32(v), sign = (bits >> 24) & splat_u32(0x80);
    const U32x16 magnitude = bits & splat_u32(0x7fffffff);
    const U32x16 normal =
        (magnitude + splat_u32(0x7ffff) + ((magnitude >> 20) & splat_u32(1)) - splat_u32(120u << 23)) >> 20;
    // Below 2^-6 steps are 2^-9, as those of floats above 2^14 are.
    const U32x16 small = as_u32(as_f32(magnitude) + splat(0x1p14f)) - splat_u32(0x46800000u);
    return select(as_i32(magnitude) < splat_i32(121 << 23), small, normal) | sign;
  }
};

// Code c is 2 c - 15 in units of the scale. Heads are rotated before (turn_head in attention_heads.h).
struct Q4Code {
  static constexpr int per_byte = 2;
  static constexpr float limit = 15.0f;
  static constexpr float unit = 1.0f;
  static constexpr bool interleaved = false, by_two = false;
  VX_INLINE U32x16 encode(F32x16 v) { return as_u32(to_i32(v * splat(0.5f) + splat(7.5f))); }

  // 16 bytes of a K group, or of a V group, to 16 cells.
  template <bool of_values>
  VX_INLINE void widen(const uint8_t* codes, uint32_t* out) {
#if VX_NATIVE_BYTES == 64
    const __m512i words = _mm512_srli_epi32(
        _mm512_castps_si512(_mm512_setr_ps(-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15)), 16);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    const __m512i low = _mm512_permutexvar_epi32(bytes, words);  // by the lower four bits of a lane
    const __m512i high = _mm512_permutexvar_epi32(_mm512_srli_epi32(bytes, 4), words);
    const __m512i first = of_values ? _mm512_shuffle_i32x4(low, high, 0x44) : low;
    const __m512i second = of_values ? _mm512_shuffle_i32x4(low, high, 0xee) : high;
    _mm512_storeu_si512(out, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
#else
    typedef uint64_t Halves __attribute__((vector_size(16)));
    const uint64_t nibbles = 0x0f0f0f0f0f0f0f0fu;
    Halves bytes;
    __builtin_memcpy(&bytes, codes, sizeof bytes);
    const Halves low = bytes & Halves{nibbles, nibbles}, high = (bytes >> 4) & Halves{nibbles, nibbles};
    const Halves first = of_values ? Halves{low[0], high[0]} : low;
    const Halves second = of_values ? Halves{low[1], high[1]} : high;
    const auto value = [](const Halves& c) __attribute__((always_inline)) {
      return as_u32(to_f32((load_i8((const int8_t*)&c) << 1) - splat_i32(15)));
    };
    store_u32(out, (value(first) >> 16) | value(second));
#endif
  }
};

// The low bytes of 16 lanes. GCC takes 512 bits apart lane by lane where `store_u8` converts them.
VX_INLINE void store_codes(uint8_t* out, U32x16 v) {
#if VX_NATIVE_BYTES == 64
  _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8((__m512i)v));
#else
  store_u8(out, v);
#endif
}

// One head of one token, `width` floats (a multiple of 16) -> as many codes. Returns the scale for
// what Code::load makes of them.
template <class Code>
VX_INLINE float quantise_head(const float* x, int width, uint8_t* codes) {
  F32x16 greatest = zero();
  I32x16 broken = splat_i32(0);
  for (int i = 0; i < width; i += 16) {
    const F32x16 v = load(x + i);
    greatest = max(abs(v), greatest);
    broken = broken | ((v - v) != zero());
  }
  const float largest = reduce_max(greatest);
  const bool finite = !any(broken), some = finite && largest > 1e-30f;
  const F32x16 factor = splat(some ? Code::limit / largest : 0.0f);
  for (int i = 0; i < width; i += 16) {
    store_codes(codes + i, Code::encode((finite ? load(x + i) : zero()) * factor));
  }
  if (!finite) return __builtin_nanf("");
  return some ? largest / Code::limit * Code::unit : 0.0f;
}

template <class KeyCode, class ValueCode = KeyCode>
struct CodePages {
  typedef uint8_t Cell;
  typedef Bf16Pages Arithmetic;
  typedef KeyCode Keys;
  typedef ValueCode Values;
  static constexpr bool scaled = true;
  static constexpr int keys_per_cell = Keys::per_byte, values_per_cell = Values::per_byte;
  static constexpr int scale_cells = kGroup * sizeof(float);
};

// Bytes of codes that become a bf16 cell.
template <class Code>
constexpr int kCodeBytes = 2 / Code::per_byte;

// A group of 2 * cells codes as bf16 cells. Some go by two vectors: it may then read as far as the
// group's scales, and write 16 cells too many.
template <class Code, bool of_values>
VX_INLINE void widen_group(const uint8_t* codes, int cells, uint32_t* out) {
  if constexpr (Code::per_byte == 2) {
    for (int i = 0; i < cells; i += 16) Code::template widen<of_values>(codes + i, out + i);
  } else if constexpr (Code::by_two) {
    for (int i = 0; i < cells; i += 32) Code::widen_twice(codes + 2 * i, out + i);
  } else {
    for (int i = 0; i < cells; i += 16) {
      const F32x16 low = Code::load(codes + 2 * i), high = Code::load(codes + 2 * i + 16);
      store_u32(out + i, (as_u32(low) >> 16) | as_u32(high));
    }
  }
}

}  // namespace VX_ISA
}  // namespace vx
