// The codes of 32 columns out of a packed block (block_layout.h): eight vectors of bytes, one a quad.
#pragma once
#include "block_layout.h"
#include "int8.h"

namespace vx {
namespace VX_ISA {

// table[byte] for every byte of w, which are below 16.
VX_INLINE NativeU look_up(NativeU w, const uint8_t* table) {
#if VX_NATIVE_BYTES == 64
  const __m128i levels = _mm_loadu_si128((const __m128i*)table);
  return (NativeU)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), (__m512i)w);
#elif VX_NATIVE_BYTES == 32
  const __m128i levels = _mm_loadu_si128((const __m128i*)table);
  return (NativeU)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(levels), (__m256i)w);
#elif defined(__aarch64__)
  return (NativeU)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)w);
#else
  uint8_t bytes[16];
  __builtin_memcpy(bytes, &w, 16);
  for (int i = 0; i < 16; ++i) bytes[i] = table[bytes[i]];
  __builtin_memcpy(&w, bytes, 16);
  return w;
#endif
}

// Each byte of v shifted down by n bits, up where n is negative. What comes in from beside is to be masked.
VX_INLINE NativeU shift_bytes(NativeU v, int n) {
#if defined(__AVX512VBMI__)  // a shift takes port 0, which is the busy one beside tiles
  const __m512i places = _mm512_set1_epi64(0x7870686058504840 + n * 0x0101010101010101);
  return n ? (NativeU)_mm512_multishift_epi64_epi8(places, (__m512i)v) : v;
#else
  return n < 0 ? v << -n : v >> n;
#endif
}

// The B bits of quad j of a plane, shifted up by `place`.
template <int B>
VX_INLINE NativeU plane_bits(const uint8_t* p, int j, int place) {
  const int shift = j % (8 / B) * B;
  const NativeU v = load_as<NativeU>(p + j / (8 / B) * 64);
  const NativeU mask = splat_as(Tag<NativeU>(), 0x01010101u * (uint32_t)(((1 << B) - 1) << place));
  return shift_bytes(v, shift - place) & mask;
}

// Of the rows whose lanes begin at p. With a table, the value of each code plus the format's zero; for
// all formats less CODE_BIAS.
template <class Format>
VX_INLINE void load_codes(const uint8_t* p, NativeU* w) {
  typedef layout::Codes<Format::BITS> Codes;
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    if constexpr (Codes::LOW == 8)
      w[j] = load_as<NativeU>(p + j * 64);
    else
      w[j] = plane_bits<Codes::LOW>(p, j, 0);
    if constexpr (Codes::HIGH > 0)
      w[j] = w[j] | plane_bits<Codes::HIGH>(p + Codes::LOW_BYTES, j, Codes::LOW);
    if constexpr (Format::TABLE) w[j] = look_up(w[j], Format::LEVELS);
    if constexpr (CODE_BIAS<Format> != 0) w[j] = w[j] ^ splat_as(Tag<NativeU>(), 0x80808080u);
  }
}

VX_INLINE NativeF load_half(const uint8_t* p) { return load_f16_as(Tag<NativeF>(), (const uint16_t*)p); }

}  // namespace VX_ISA
}  // namespace vx
