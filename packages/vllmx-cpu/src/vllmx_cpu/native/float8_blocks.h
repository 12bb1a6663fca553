// Float8 (e4m3) weights, one byte each in memory, widened in registers and multiplied with float
// activations; the unit's sum is scaled in float32. Where the machine multiplies pairs of bf16, both
// factors are bf16 (every e4m3 value is one); elsewhere both are float32.
//
// The codes for NaN read as 480 here: the packer gives their unit a scale that is NaN.
#pragma once
#include "block_layout.h"
#include "int8.h"
#include "simd.h"

namespace vx {
namespace VX_ISA {

#if defined(__AVX512BF16__)

// bf16 of the codes without their sign, by bytes.
struct Float8Table {
  alignas(64) uint8_t low[128] = {}, high[128] = {};
  constexpr Float8Table() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      if (exponent == 0 && mantissa != 0) {  // subnormal: shifted until the first bit is implicit
        for (exponent = 1; mantissa < 8; mantissa *= 2) --exponent;
        mantissa -= 8;
      }
      const int bits = code == 0 ? 0 : (exponent + 120) << 7 | mantissa << 4;
      low[code] = (uint8_t)(bits & 255), high[code] = (uint8_t)(bits >> 8);
    }
  }
};
static constexpr Float8Table float8_table;

// The even and the odd bytes of each lane as bf16.
VX_INLINE void float8_to_bf16(U32x16 codes, U32x16* even, U32x16* odd) {
  const __m512i v = (__m512i)codes;
#if defined(__AVX512VBMI__)
  const uint8_t *low_table = float8_table.low, *high_table = float8_table.high;
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(low_table), v, _mm512_load_si512(low_table + 64));
  const __m512i found =
      _mm512_permutex2var_epi8(_mm512_load_si512(high_table), v, _mm512_load_si512(high_table + 64));
  const __m512i high = _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)0x80), v, found, 0xca);
  const __m512i upper = _mm512_set1_epi32((int)0xff00ff00u);  // the bytes from the first argument
  *even = (U32x16)_mm512_ternarylogic_epi32(upper, _mm512_slli_epi32(high, 8), low, 0xca);
  *odd = (U32x16)_mm512_ternarylogic_epi32(upper, high, _mm512_srli_epi32(low, 8), 0xca);
#else
  alignas(64) static const uint16_t subnormal[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  U32x16* found[2] = {even, odd};
  for (int i = 0; i < 2; ++i) {
    const __m512i high = i ? v : _mm512_slli_epi32(v, 8);  // in the upper byte of each word
    const __m512i low = i ? _mm512_srli_epi32(v, 8) : v;   // in the lower one
    const __m512i magnitude = _mm512_and_si512(_mm512_srli_epi16(high, 4), _mm512_set1_epi16(0x07f0));
    __m512i value = _mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7));
    const __mmask32 small = _mm512_testn_epi16_mask(low, _mm512_set1_epi16(0x78));
    value = _mm512_mask_permutexvar_epi16(value, small, low, _mm512_load_si512(subnormal));
    // the sign of `high`, the rest of `value`
    *found[i] = (U32x16)_mm512_ternarylogic_epi32(_mm512_set1_epi16((short)0x8000), high, value, 0xca);
  }
#endif
}

#else

// Byte i of each lane as float32.
VX_INLINE NativeF float8_to_f32(NativeU codes, int i) {
  const NativeU byte = codes >> (8 * i), magnitude = byte & 0x7f;
  const NativeF normal = as_f32((magnitude << 20) + (120u << 23));
  const NativeF small = normal + normal - 0.015625f;  // without the implicit one
  const NativeF value = select(as_i32(magnitude) < 8, small, normal);
  return as_f32(as_u32(value) | ((byte & 0x80) << 24));
}

#endif

// A token's unit in a panel: for each four columns bf16 of columns 0, 2, 1, 3, or float32 in order.
struct Float8Blocks {
  typedef layout::Float8 Format;
  enum {
    QUANTISED = 1, UNIT_COLS = Format::UNIT_COLS, UNIT_BYTES = Format::UNIT_BYTES, CODE_BYTES = Format::CODE_BYTES,
#if defined(__AVX512BF16__)
    FOUR_BYTES = 8,
#else
    FOUR_BYTES = 16,
#endif
    PANEL_BYTES = UNIT_COLS / 4 * FOUR_BYTES,
  };

  static void pack_unit(const float* x, uint8_t* out) {
#if defined(__AVX512BF16__)
    uint16_t words[UNIT_COLS];
    for (int k = 0; k < UNIT_COLS; k += 16) store_bf16(words + k, load(x + k));
    for (int k = 0; k < UNIT_COLS; k += 4) {
      const uint16_t four[4] = {words[k], words[k + 2], words[k + 1], words[k + 3]};
      __builtin_memcpy(out + k * 2, four, 8);
    }
#else
    __builtin_memcpy(out, x, PANEL_BYTES);
#endif
  }

  template <int MB>
  VX_INLINE void multiply(NativeF* acc, const uint8_t* block, int32_t u, int32_t units, int lane,
                          const uint8_t* x) {
    const uint8_t* codes = block + Format::codes(u, 0) + lane * 4;
    const NativeF scale = load_as<NativeF>(block + Format::scale(u, units) + lane * 4);
    NativeF sum[MB], odd[MB];
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t) sum[t] = odd[t] = splat_as(Tag<NativeF>(), 0.0f);
#pragma GCC unroll 1
    for (int j = 0; j < UNIT_COLS / 4; ++j) {
      const NativeU four = load_as<NativeU>(codes + j * 64);
      const uint8_t* p = x + j * FOUR_BYTES;
#if defined(__AVX512BF16__)
      U32x16 a, b;
      float8_to_bf16(four, &a, &b);
#pragma GCC unroll 16
      for (int t = 0; t < MB; ++t, p += PANEL_BYTES) {
        sum[t] = dot_bf16(sum[t], a, splat_u32(read_as<uint32_t>(p)));
        odd[t] = dot_bf16(odd[t], b, splat_u32(read_as<uint32_t>(p + 4)));
      }
#else
      NativeF w[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) w[i] = float8_to_f32(four, i);
#pragma GCC unroll 16
      for (int t = 0; t < MB; ++t, p += PANEL_BYTES)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          NativeF& half = i % 2 ? odd[t] : sum[t];
          half = fma(w[i], splat_as(Tag<NativeF>(), read_as<float>(p + i * 4)), half);
        }
#endif
    }
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t) acc[t] = fma(scale, sum[t] + odd[t], acc[t]);
  }
};

}  // namespace VX_ISA
}  // namespace vx
