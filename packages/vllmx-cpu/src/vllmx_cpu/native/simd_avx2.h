// One AVX2 register; see simd_native.h, and simd_avx512.h for what the functions do.
#pragma once

namespace vx {
namespace VX_ISA {

VX_INLINE NativeF splat_as(Tag<NativeF>, float x) { return (NativeF)_mm256_set1_ps(x); }
VX_INLINE NativeI splat_as(Tag<NativeI>, int32_t x) { return (NativeI)_mm256_set1_epi32(x); }

VX_INLINE NativeI to_i32(NativeF v) { return (NativeI)_mm256_cvtps_epi32((__m256)v); }
VX_INLINE NativeF fma(NativeF a, NativeF b, NativeF c) {
  return (NativeF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
VX_INLINE NativeF max(NativeF a, NativeF b) { return (NativeF)_mm256_max_ps((__m256)a, (__m256)b); }
VX_INLINE NativeF min(NativeF a, NativeF b) { return (NativeF)_mm256_min_ps((__m256)a, (__m256)b); }
VX_INLINE bool any(NativeI mask) { return _mm256_movemask_ps((__m256)mask) != 0; }

VX_INLINE float reduce_add(NativeF v) {
  Quad q[2];
  __builtin_memcpy(q, &v, sizeof v);
  return reduce_add(q[0] + q[1]);
}
VX_INLINE float reduce_max(NativeF v) {
  return reduce_max((Quad)_mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1)));
}

VX_INLINE NativeF load_f16_as(Tag<NativeF>, const uint16_t* p) {
  return (NativeF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
VX_INLINE void store_f16(uint16_t* p, NativeF v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
VX_INLINE NativeI load_i8_as(Tag<NativeI>, const int8_t* p) {
  return (NativeI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}

}  // namespace VX_ISA
}  // namespace vx
