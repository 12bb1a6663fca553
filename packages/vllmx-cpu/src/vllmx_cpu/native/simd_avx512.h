// One AVX-512 register; see simd_native.h.
#pragma once

namespace vx {
namespace VX_ISA {

VX_INLINE NativeF splat_as(Tag<NativeF>, float x) { return (NativeF)_mm512_set1_ps(x); }
VX_INLINE NativeI splat_as(Tag<NativeI>, int32_t x) { return (NativeI)_mm512_set1_epi32(x); }

// To the nearest integer, ties to even.
VX_INLINE NativeI to_i32(NativeF v) { return (NativeI)_mm512_cvtps_epi32((__m512)v); }
// a * b + c, rounded once where the machine has it.
VX_INLINE NativeF fma(NativeF a, NativeF b, NativeF c) {
  return (NativeF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
// The greater (lesser) of two; when either is NaN, b.
VX_INLINE NativeF max(NativeF a, NativeF b) { return (NativeF)_mm512_max_ps((__m512)a, (__m512)b); }
VX_INLINE NativeF min(NativeF a, NativeF b) { return (NativeF)_mm512_min_ps((__m512)a, (__m512)b); }
// True when any lane of a comparison's result is set.
VX_INLINE bool any(NativeI mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }

VX_INLINE float reduce_add(NativeF v) {
  Quad q[4];
  __builtin_memcpy(q, &v, sizeof v);
  return reduce_add((q[0] + q[2]) + (q[1] + q[3]));
}
VX_INLINE float reduce_max(NativeF v) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256((__m512)v),
                                    _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)));
  return reduce_max((Quad)_mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

VX_INLINE NativeF load_f16_as(Tag<NativeF>, const uint16_t* p) {
  return (NativeF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
// Nearest, ties to even; beyond 65504 infinity.
VX_INLINE void store_f16(uint16_t* p, NativeF v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
// Bytes, sign-extended.
VX_INLINE NativeI load_i8_as(Tag<NativeI>, const int8_t* p) {
  return (NativeI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}

}  // namespace VX_ISA
}  // namespace vx
