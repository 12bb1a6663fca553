// KV pages of 8-bit codes: what a vector is rounded to, and how a chunk becomes bf16 again.
//
// vllmx_core/kv_quant.py has the rule. A group holds pairs of 16 codes that one vector of bf16 cells
// is made of, then a float scale for each of its 16 positions:
//   K group  [D / 2][2 features][16 positions]          scales [16 positions]
//   V group  [8][Dp / 16][2 positions][16 features]     scales [16 positions]
// Every code is exact in bf16, so a chunk is widened into scratch once for all query heads of a unit
// and multiplied as bf16 pages are; the scales go to the scores and to the probabilities.
#pragma once
#include "attention_pages.h"

namespace vx {
namespace VX_ISA {

struct Int8Code {
  static constexpr float limit = 127.0f;
  static constexpr float unit = 1.0f;  // of what `load` returns
  VX_INLINE F32x16 load(const uint8_t* codes) { return to_f32(load_i8((const int8_t*)codes)); }
  VX_INLINE U32x16 encode(F32x16 v) { return as_u32(to_i32(v)); }
};

struct Fp8Code {
  static constexpr float limit = 448.0f;
  static constexpr float unit = 256.0f;
  // A byte of e4m3 is a half but for the bias of its exponent: these are the values / 256. 0x7f, which
  // only a page that was never written holds, is 480 / 256.
  VX_INLINE F32x16 load(const uint8_t* codes) {
#if VX_NATIVE_BYTES >= 32
    __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes));
    words = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16((short)0xbf80));
#if VX_NATIVE_BYTES == 64
    return (F32x16)_mm512_cvtph_ps(words);
#else
    return {(NativeF)_mm256_cvtph_ps(_mm256_castsi256_si128(words)),
            (NativeF)_mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
#endif
#else
    const U32x16 bits = as_u32(load_i8((const int8_t*)codes));
    const F32x16 magnitude = as_f32((bits & splat_u32(0x7f)) << 20) * splat(0x1p112f);
    return as_f32(as_u32(magnitude) | (bits & splat_u32(0x80000000u)));
#endif
  }
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
    store_u8(codes + i, Code::encode((finite ? load(x + i) : zero()) * factor));
  }
  if (!finite) return __builtin_nanf("");
  return some ? largest / Code::limit * Code::unit : 0.0f;
}

template <class Code>
struct CodePages {
  typedef uint8_t Cell;
  typedef Bf16Pages Arithmetic;
  typedef Code Kind;
  static constexpr bool scaled = true;
  static constexpr int per_cell = 1;
  static constexpr int scale_cells = kGroup * sizeof(float);
};

// A group of 2 * cells codes as bf16 cells, and the group `ahead` on its way into the cache.
template <class Code>
VX_INLINE void widen_group(const uint8_t* codes, const uint8_t* ahead, int cells, uint32_t* out) {
  for (int i = 0; i < cells; i += 16) {
    if (i % 32 == 0) prefetch_pages(ahead + 2 * i);
    const F32x16 low = Code::load(codes + 2 * i), high = Code::load(codes + 2 * i + 16);
    store_u32(out + i, (as_u32(low) >> 16) | as_u32(high));
  }
  prefetch_pages(ahead + 2 * cells);  // the scales
}

}  // namespace VX_ISA
}  // namespace vx
