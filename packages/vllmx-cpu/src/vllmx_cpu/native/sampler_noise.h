// The draw's noise: vllmx_core.sampling.gumbel_noise for 64 ids at a time.
//
// Philox4x32-10 gives four words per counter, so sixteen counters (one vector) serve 64 consecutive
// ids. 32 x 32 -> 64 bit products come from the even lanes and the odd lanes separately.
#pragma once
#include "exp2.h"

namespace vx {
namespace VX_ISA {

constexpr int kNoiseBlock = 64;
constexpr float kGreatestNoise = 16.65f;  // -ln(-ln(1 - 2^-24)) = 16.6355 is the greatest there is

struct WideProduct {
  U32x16 high, low;
};

VX_INLINE WideProduct multiply_wide(U32x16 a, uint32_t b) {
#if VX_NATIVE_BYTES == 64
  __m512i factor = _mm512_set1_epi32((int)b), x = (__m512i)a;
  __m512i even = _mm512_mul_epu32(x, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), factor);
  return {(U32x16)_mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_CDAB),
          (U32x16)_mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_CDAB)};
#else
  alignas(64) uint32_t in[16], high[16], low[16];
  store_u32(in, a);
  for (int i = 0; i < 16; ++i) {
    uint64_t product = (uint64_t)in[i] * b;
    high[i] = (uint32_t)(product >> 32);
    low[i] = (uint32_t)product;
  }
  return {load_u32(high), load_u32(low)};
#endif
}

// Random words of 64 consecutive ids: that of id first + 4 * lane + w is words[w], lane by lane.
struct NoiseWords {
  U32x16 words[4];
};

// first is a multiple of 64.
VX_INLINE NoiseWords noise_words(uint64_t seed, uint32_t position, uint32_t first) {
  U32x16 c0 = as_u32(lane_index()) + splat_u32(first >> 2), c1 = splat_u32(position);
  U32x16 c2 = splat_u32(0), c3 = splat_u32(0);
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    WideProduct p0 = multiply_wide(c0, 0xD2511F53u), p1 = multiply_wide(c2, 0xCD9E8D57u);
    c0 = p1.high ^ c1 ^ splat_u32(k0);
    c2 = p0.high ^ c3 ^ splat_u32(k1);
    c1 = p1.low;
    c3 = p0.low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// uniform: (0, 1) as core makes it of a word.
VX_INLINE F32x16 uniform_of(U32x16 word) {
  return to_f32(as_i32(word >> 9)) * splat(0x1p-23f) + splat(0x1p-24f);
}
VX_INLINE F32x16 gumbel_of(F32x16 uniform) { return -log_positive(-log_positive(uniform)); }

// The greatest noise among the 64, a little on the safe side.
VX_INLINE float greatest_gumbel(const NoiseWords& noise) {
  F32x16 greatest = max(max(uniform_of(noise.words[0]), uniform_of(noise.words[1])),
                        max(uniform_of(noise.words[2]), uniform_of(noise.words[3])));
  return reduce_max(gumbel_of(greatest)) + 1e-3f;
}

// In the order of the ids.
VX_INLINE void store_gumbel(const NoiseWords& noise, float* out) {
  alignas(64) float by_word[4][16];
  for (int w = 0; w < 4; ++w) store(by_word[w], gumbel_of(uniform_of(noise.words[w])));
  for (int i = 0; i < 16; ++i)
    for (int w = 0; w < 4; ++w) out[4 * i + w] = by_word[w][i];
}

}  // namespace VX_ISA
}  // namespace vx
