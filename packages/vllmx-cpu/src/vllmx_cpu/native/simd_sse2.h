// One SSE2 register, which every x86-64 processor has; see simd_native.h, and simd_avx512.h for what
// the functions do.
#pragma once

namespace vx {
namespace VX_ISA {

VX_INLINE NativeF splat_as(Tag<NativeF>, float x) { return NativeF{x, x, x, x}; }
VX_INLINE NativeI splat_as(Tag<NativeI>, int32_t x) { return NativeI{x, x, x, x}; }

VX_INLINE NativeI to_i32(NativeF v) { return (NativeI)_mm_cvtps_epi32((__m128)v); }
VX_INLINE NativeF fma(NativeF a, NativeF b, NativeF c) { return a * b + c; }  // rounded twice
VX_INLINE NativeF max(NativeF a, NativeF b) { return (NativeF)_mm_max_ps((__m128)a, (__m128)b); }
VX_INLINE NativeF min(NativeF a, NativeF b) { return (NativeF)_mm_min_ps((__m128)a, (__m128)b); }
VX_INLINE bool any(NativeI mask) { return _mm_movemask_ps((__m128)mask) != 0; }

// Shift the exponent into place and let a multiplication by 2^112 correct its bias: exact, and right
// for denormals too. An exponent of all ones (inf, NaN) is set by hand.
VX_INLINE NativeF load_f16_as(Tag<NativeF>, const uint16_t* p) {
  NativeHalfWords half;
  __builtin_memcpy(&half, p, sizeof half);
  const NativeU words = __builtin_convertvector(half, NativeU), magnitude = (words & 0x7fff) << 13;
  const NativeU scaled = (NativeU)((NativeF)magnitude * 0x1p112f);
  const NativeU bits = (NativeI)magnitude >= 0x7c00 << 13 ? magnitude | 0x7f800000u : scaled;
  return (NativeF)(bits | ((words & 0x8000) << 16));
}
VX_INLINE void store_f16(uint16_t* p, NativeF v) {
  const NativeU bits = (NativeU)v, sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffffu;
  const NativeI ordered = (NativeI)magnitude;
  // Denormal results: adding 0.5 leaves the rounded value in the low mantissa bits.
  const NativeU small = (NativeU)((NativeF)magnitude + 0.5f) - 0x3f000000u;
  const NativeU normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  const NativeU infinity = (NativeU)splat_as(Tag<NativeI>(), 0x7c00), nan = infinity | 0x200;
  NativeU half = ordered < 113 << 23 ? small : normal;
  half = ordered >= 0x477ff000 ? infinity : half;
  half = ordered > 0x7f800000 ? nan : half;
  const NativeHalfWords words = __builtin_convertvector(half | sign, NativeHalfWords);
  __builtin_memcpy(p, &words, sizeof words);
}
VX_INLINE NativeI load_i8_as(Tag<NativeI>, const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  const __m128i bytes = _mm_cvtsi32_si128(four), none = _mm_setzero_si128();
  return (NativeI)_mm_unpacklo_epi16(none, _mm_unpacklo_epi8(none, bytes)) >> 24;
}

}  // namespace VX_ISA
}  // namespace vx
