// Integer dot products of bytes, and activations rounded to int8 for them.
//
// A quad is four activations of one token. Where the machine multiplies bytes (VNNI) it is four int8;
// elsewhere four int16 in the order 0, 2, 1, 3, because the even and the odd bytes of a weight are
// then one mask or one shift away from 16-bit factors. The sums are the same integers everywhere:
// none of these instructions saturates for the ranges below.
#pragma once
#include "simd.h"

namespace vx {
namespace VX_ISA {

#if defined(__AVX512VNNI__)
enum { QUAD_BYTES = 4 };
#else
enum { QUAD_BYTES = 8 };
#endif

template <class T>
VX_INLINE T read_as(const uint8_t* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

// acc[i] + the products of the two int16 of lane i of w with the two int16 at x.
VX_INLINE NativeI dot_words(NativeI acc, NativeU w, const uint8_t* x) {
#if defined(__AVX512VNNI__)
  const __m512i pair = _mm512_set1_epi32(read_as<int32_t>(x));
  return (NativeI)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, pair);
#elif VX_NATIVE_BYTES == 64
  const __m512i pair = _mm512_set1_epi32(read_as<int32_t>(x));
  return acc + (NativeI)_mm512_madd_epi16((__m512i)w, pair);
#elif VX_NATIVE_BYTES == 32
  const __m256i pair = _mm256_set1_epi32(read_as<int32_t>(x));
  return acc + (NativeI)_mm256_madd_epi16((__m256i)w, pair);
#elif defined(__x86_64__)
  const __m128i pair = _mm_set1_epi32(read_as<int32_t>(x));
  return acc + (NativeI)_mm_madd_epi16((__m128i)w, pair);
#else
  const NativeI low = splat_as(Tag<NativeI>(), read_as<int16_t>(x));
  const NativeI high = splat_as(Tag<NativeI>(), read_as<int16_t>(x + 2));
  return acc + ((NativeI)(w << 16) >> 16) * low + ((NativeI)w >> 16) * high;
#endif
}
// acc[i] + the products of the four unsigned bytes of lane i of w with the quad at x.
VX_INLINE NativeI dot_bytes(NativeI acc, NativeU w, const uint8_t* x) {
#if defined(__AVX512VNNI__)
  const __m512i quad = _mm512_set1_epi32(read_as<int32_t>(x));
  return (NativeI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, quad);
#else
  const NativeU even = splat_as(Tag<NativeU>(), 0x00ff00ffu);
  return dot_words(dot_words(acc, w & even, x), (w >> 8) & even, x + 4);
#endif
}
template <class H, class W>
VX_INLINE Twice<H> dot_words(Twice<H> acc, Twice<W> w, const uint8_t* x) {
  return {dot_words(acc.lo, w.lo, x), dot_words(acc.hi, w.hi, x)};
}
template <class H, class W>
VX_INLINE Twice<H> dot_bytes(Twice<H> acc, Twice<W> w, const uint8_t* x) {
  return {dot_bytes(acc.lo, w.lo, x), dot_bytes(acc.hi, w.hi, x)};
}

// Sixteen values in -127 ... 127 as four quads; returns their sum.
VX_INLINE int32_t store_quads(uint8_t* out, I32x16 v) {
#if defined(__AVX512VNNI__)
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v);
  __builtin_memcpy(out, &bytes, 16);
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t lanes[16], total = 0;
  store_i32(lanes, v);
  for (int i = 0; i < 16; i += 4) {
    const int16_t quad[4] = {(int16_t)lanes[i], (int16_t)lanes[i + 2], (int16_t)lanes[i + 1],
                             (int16_t)lanes[i + 3]};
    __builtin_memcpy(out + i / 4 * QUAD_BYTES, quad, 8);
    total += lanes[i] + lanes[i + 1] + lanes[i + 2] + lanes[i + 3];
  }
  return total;
#endif
}

// COLS activations as round(x / scale), scale = max |x| / 127, and the sum of each 16 of them. The
// scale is NaN where one of them is not finite, and so is everything computed with it.
template <int COLS>
VX_INLINE float quantise(const float* x, uint8_t* quads, int32_t* sums) {
  F32x16 largest = zero();
  I32x16 broken = splat_i32(0);
  for (int i = 0; i < COLS; i += 16) {
    const F32x16 v = load(x + i);
    largest = max(abs(v), largest);
    broken = broken | ((v - v) != zero());
  }
  const float amax = reduce_max(largest);
  const bool finite = !any(broken);
  const F32x16 factor = splat(finite && amax > 1e-30f ? 127.0f / amax : 0.0f);
  for (int i = 0; i < COLS; i += 16) {
    const F32x16 v = finite ? load(x + i) : zero();
    sums[i / 16] = store_quads(quads + i / 4 * QUAD_BYTES, to_i32(v * factor));
  }
  return finite ? amax / 127.0f : __builtin_nanf("");
}

}  // namespace VX_ISA
}  // namespace vx
