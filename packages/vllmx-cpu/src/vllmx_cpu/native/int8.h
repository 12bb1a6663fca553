// Integer dot products of bytes, and activations rounded to int8 for them.
//
// A quad is four activations of one token. Where the machine multiplies the bytes of a format's codes
// it is four int8; elsewhere four int16 in the order 0, 2, 1, 3, because the even and the odd bytes of
// a weight are then one mask or one shift away from 16-bit factors. The sums are the same integers
// everywhere: none of these instructions saturates for the ranges below.
#pragma once
#include <type_traits>

#include "simd.h"

namespace vx {
namespace VX_ISA {

// AVX2 and AVX-512 add two products of an unsigned and a signed byte in 16 bits: enough for codes below
// 128. Of signed codes AVX2 (not AVX-512) gives the sign to the other factor.
template <class Format>
#if defined(__AVX512VNNI__) || defined(__aarch64__) || VX_NATIVE_BYTES == 32
static constexpr bool BYTE_QUADS = true;
#elif VX_NATIVE_BYTES == 64
static constexpr bool BYTE_QUADS = !Format::WIDE;
#else
static constexpr bool BYTE_QUADS = false;
#endif
template <class Format>
static constexpr int QUAD_BYTES = BYTE_QUADS<Format> ? 4 : 8;

// What `load_codes` takes off each code of a format, to make it a signed byte.
template <class Format>
#if defined(__aarch64__) || VX_NATIVE_BYTES == 32
static constexpr int CODE_BIAS = Format::WIDE ? 128 : 0;
#else
static constexpr int CODE_BIAS = 0;
#endif

template <class T>
VX_INLINE T read_as(const uint8_t* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

// acc[i] + the products of the two int16 of lane i of a with those of b.
VX_INLINE NativeI dot_word_pairs(NativeI acc, NativeU a, NativeU b) {
#if defined(__AVX512VNNI__)
  return (NativeI)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif VX_NATIVE_BYTES == 64
  return acc + (NativeI)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif VX_NATIVE_BYTES == 32
  return acc + (NativeI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return acc + (NativeI)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  return acc + (NativeI)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#endif
}
// acc[i] + the products of the two int16 of lane i of w with the two int16 at x.
VX_INLINE NativeI dot_words(NativeI acc, NativeU w, const uint8_t* x) {
  return dot_word_pairs(acc, w, (NativeU)splat_as(Tag<NativeI>(), read_as<int32_t>(x)));
}
#if !defined(__AVX512VNNI__) && VX_NATIVE_BYTES > 16
// Sums of two products, as int16, of the unsigned bytes of w and the quad at x.
VX_INLINE NativeU multiply_bytes(NativeU w, const uint8_t* x) {
#if VX_NATIVE_BYTES == 64
  return (NativeU)_mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(read_as<int32_t>(x)));
#else
  return (NativeU)_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(read_as<int32_t>(x)));
#endif
}
VX_INLINE NativeU add_words(NativeU a, NativeU b) {
#if VX_NATIVE_BYTES == 64
  return (NativeU)_mm512_add_epi16((__m512i)a, (__m512i)b);
#else
  return (NativeU)_mm256_add_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

// acc[i] + the products of the codes of lane i of w[j] with quad j, for N quads (four on ARM with its
// dot product, whose operand is a lane of four quads).
template <class Format, int N>
VX_INLINE NativeI dot_some(NativeI acc, const NativeU* w, const uint8_t* x) {
#if defined(__AVX512VNNI__)
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    const __m512i quad = _mm512_set1_epi32(read_as<int32_t>(x + j * 4));
    acc = (NativeI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w[j], quad);
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  static_assert(N == 4, "a register of quads");
  const int8x16_t quads = vld1q_s8((const int8_t*)x);
  int32x4_t sum = vdotq_laneq_s32((int32x4_t)acc, (int8x16_t)w[0], quads, 0);
  sum = vdotq_laneq_s32(sum, (int8x16_t)w[1], quads, 1);
  sum = vdotq_laneq_s32(sum, (int8x16_t)w[2], quads, 2);
  acc = (NativeI)vdotq_laneq_s32(sum, (int8x16_t)w[3], quads, 3);
#elif defined(__aarch64__)
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {  // two products of -128 ... 127 by -127 ... 127 fit 16 bits
    const int8x16_t quad = vreinterpretq_s8_s32(vdupq_n_s32(read_as<int32_t>(x + j * 4)));
    const int8x16_t codes = (int8x16_t)w[j];
    const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(quad));
    acc = (NativeI)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, vmull_high_s8(codes, quad)));
  }
#else
#if VX_NATIVE_BYTES > 16
  static constexpr int16_t ones[2] = {1, 1};
#if VX_NATIVE_BYTES == 32
  if constexpr (Format::WIDE) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {  // two products of 0 ... 128 by -127 ... 127 fit 16 bits
      const __m256i quad = _mm256_set1_epi32(read_as<int32_t>(x + j * 4)), codes = (__m256i)w[j];
      const __m256i sum = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(quad, codes));
      acc = dot_words(acc, (NativeU)sum, (const uint8_t*)ones);
    }
    return acc;
  }
#endif
  if constexpr (BYTE_QUADS<Format>) {
    constexpr int MAX_CODE = Format::TABLE ? 24 : (1 << Format::BITS) - 1;
    constexpr int FITTING = 32767 / (MAX_CODE * 127 * 2);  // quads whose sums fit 16 bits
    constexpr int TOGETHER = FITTING >= N ? N : FITTING >= 4 ? 4 : FITTING >= 2 ? 2 : 1;
#pragma GCC unroll 8
    for (int j = 0; j < N; j += TOGETHER) {
      NativeU sum = multiply_bytes(w[j], x + j * 4);
#pragma GCC unroll 8
      for (int i = 1; i < TOGETHER; ++i) sum = add_words(sum, multiply_bytes(w[j + i], x + (j + i) * 4));
      acc = dot_words(acc, sum, (const uint8_t*)ones);
    }
    return acc;
  }
#endif
  const NativeU even = splat_as(Tag<NativeU>(), 0x00ff00ffu);
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j, x += 8)
    acc = dot_words(dot_words(acc, w[j] & even, x), (w[j] >> 8) & even, x + 4);
#endif
  return acc;
}

// The same for up to GROUP tokens, whose quads are `stride` bytes apart. Their sums grow in turns: each
// dot product waits for the one before it, and the machine looks for others only so far ahead. With 16
// registers there is no room for that.
#if VX_NATIVE_BYTES == 64 || defined(__aarch64__)
enum { GROUP = 4 };
#else
enum { GROUP = 1 };
#endif
template <class Format, int N, int TOKENS>
VX_INLINE void dot_quads(NativeI* sum, const NativeU* w, const uint8_t* x, int stride) {
#if defined(__AVX512VNNI__)
  constexpr int STEP = 1;
#elif defined(__ARM_FEATURE_DOTPROD)
  constexpr int STEP = 4;
#else
  constexpr int STEP = N;
#endif
#pragma GCC unroll 8
  for (int j = 0; j < N; j += STEP)
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t)
      sum[t] = dot_some<Format, STEP>(sum[t], w + j, x + t * stride + j * QUAD_BYTES<Format>);
}

// Calls body(token, number of tokens), both constants, for the groups of MB tokens.
template <int MB, int TOKEN = 0, class Body>
VX_INLINE void for_groups(Body body) {
  if constexpr (TOKEN < MB) {
    body(std::integral_constant<int, TOKEN>(), std::integral_constant<int, MB - TOKEN < GROUP ? MB - TOKEN : (int)GROUP>());
    for_groups<MB, TOKEN + GROUP>(body);
  }
}

// COLS values times `factor`, rounded, as quads, and the sum of each sixteen of them. `factor` must make
// them -127 ... 127.
#if defined(__AVX512VNNI__)
template <class Format>
VX_INLINE void store_quads(const float* x, float factor, uint8_t* out, int32_t* sums) {
  const __m128i ones = _mm_set1_epi8(1);
  const auto round = [=](int i) __attribute__((always_inline)) {  // returns the sums of four quads
    const __m512i v = (__m512i)to_i32(load(x + i) * splat(factor));
    const __m128i bytes = _mm512_cvtepi32_epi8(v);
    _mm_storeu_si128((__m128i*)(out + i), bytes);
    return _mm_dpbusd_epi32(_mm_setzero_si128(), ones, bytes);
  };
#pragma GCC unroll 8
  for (int i = 0; i < Format::UNIT_COLS; i += 32) {
    const __m128i pairs = _mm_hadd_epi32(round(i), round(i + 16)), both = _mm_hadd_epi32(pairs, pairs);
    _mm_storel_epi64((__m128i*)(sums + i / 16), both);
  }
}
#else
// Sixteen values in -127 ... 127 as four quads; returns their sum.
template <class Format>
VX_INLINE int32_t store_four_quads(uint8_t* out, I32x16 v) {
#if defined(__aarch64__)
  store_u8(out, as_u32(v));
  return vaddvq_s32((int32x4_t)((v.lo.lo + v.lo.hi) + (v.hi.lo + v.hi.hi)));
#else
  int32_t lanes[16], total = 0;
  store_i32(lanes, v);
  for (int32_t lane : lanes) total += lane;
  if constexpr (BYTE_QUADS<Format>) {
    store_u8(out, as_u32(v));
    return total;
  }
  for (int i = 0; i < 16; i += 4) {
    const int16_t quad[4] = {(int16_t)lanes[i], (int16_t)lanes[i + 2], (int16_t)lanes[i + 1],
                             (int16_t)lanes[i + 3]};
    __builtin_memcpy(out + i * 2, quad, 8);
  }
  return total;
#endif
}
template <class Format>
VX_INLINE void store_quads(const float* x, float factor, uint8_t* out, int32_t* sums) {
  for (int i = 0; i < Format::UNIT_COLS; i += 16, out += 4 * QUAD_BYTES<Format>)
    *sums++ = store_four_quads<Format>(out, to_i32(load(x + i) * splat(factor)));
}
#endif

// The sums of 64 quads.
template <class Format>
VX_INLINE void sum_quads(const uint8_t* quads, int32_t* sums) {
#if defined(__AVX512VNNI__)
  for (int j = 0; j < 64; j += 16) {
    const __m512i four = _mm512_loadu_si512(quads + j * 4);
    _mm512_storeu_si512(sums + j, _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), four));
  }
#else
  for (int j = 0; j < 64; ++j) {
    if constexpr (BYTE_QUADS<Format>) {
      const int8_t* q = (const int8_t*)quads + j * 4;
      sums[j] = q[0] + q[1] + q[2] + q[3];
    } else {
      int16_t q[4];
      __builtin_memcpy(q, quads + j * 8, 8);
      sums[j] = q[0] + q[1] + q[2] + q[3];
    }
  }
#endif
}

// The largest of COLS magnitudes, or one that is not finite if there is any.
template <int COLS>
VX_INLINE float largest_magnitude(const float* x) {
#if VX_NATIVE_BYTES == 64  // the bits of magnitudes have the order of their values
  __m512i largest = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int i = 0; i < COLS; i += 16)
    largest = _mm512_max_epu32(largest, (__m512i)as_u32(abs(load(x + i))));
  const uint32_t bits = _mm512_reduce_max_epu32(largest);
  return read_as<float>((const uint8_t*)&bits);
#else
  F32x16 largest = zero();
  I32x16 broken = splat_i32(0);
  for (int i = 0; i < COLS; i += 16) {
    const F32x16 v = load(x + i);
    largest = max(abs(v), largest);
    broken = broken | ((v - v) != zero());
  }
  return any(broken) ? __builtin_inff() : reduce_max(largest);
#endif
}

// A unit's activations as round(x / scale), scale = max |x| / 127, and the sum of each 16 of them. The
// scale is NaN where one of them is not finite, and so is everything computed with it.
template <class Format>
VX_INLINE float quantise(const float* x, uint8_t* quads, int32_t* sums) {
  constexpr int COLS = Format::UNIT_COLS;
  const float amax = largest_magnitude<COLS>(x);
  if (!(amax - amax == 0.0f)) {
    alignas(64) static constexpr float zeros[COLS] = {};
    store_quads<Format>(zeros, 0.0f, quads, sums);
    return __builtin_nanf("");
  }
  store_quads<Format>(x, amax > 1e-30f ? 127.0f / amax : 0.0f, quads, sums);
  return amax / 127.0f;
}

}  // namespace VX_ISA
}  // namespace vx
