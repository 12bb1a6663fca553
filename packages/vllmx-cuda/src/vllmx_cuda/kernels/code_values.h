// What codes of 8 bits stand for, exactly, as floats and as pairs of elem, without conversions: cuda_fp8.h
// takes some 45 instructions for a code before sm_89, and other conversions have a slow pipe.
//
// e4m3 has the bits of a greater format in the middle, off by a power of two, which one product puts
// right, of subnormal codes too. Its NaN, 0x7f, is not known here: it would be 480.
#pragma once
#include "vx.h"

// Four e4m3 codes of a word
VX_DEV void e4m3_floats(float (&v)[4], u32 word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  __nv_fp8x4_e4m3 codes;
  codes.__x = word;
  float4 four = static_cast<float4>(codes);
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
#else
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int top = __byte_perm(word, 0, 0x0444 | i << 12);  // the code alone, in the highest byte
    v[i] = __int_as_float(top >> 4 & 0x87f00000) * 0x1p120f;
  }
#endif
}
// Four signed codes of a word: 2^23 + 128 + code, less what is too much
VX_DEV void int8_floats(float (&v)[4], u32 word) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 raised = __byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7540 | i);
    v[i] = __uint_as_float(raised) - 8388736.f;
  }
}

#if VX_DTYPE != VX_F32
VX_DEV u32 pair_of(float low, float high) {
  Pack<elem, 2> pack;
  pack.at[0] = from_float<elem>(low), pack.at[1] = from_float<elem>(high);
  return *reinterpret_cast<u32*>(&pack);
}
// Codes 0 and 1 of a word, or 2 and 3: sign, exponent and mantissa in the places of elem's, 2^-120
// (bf16) or 2^-8 times their value. The lower code's sign fills the bits below the upper one, which the
// shift brings to its top.
VX_DEV u32 e4m3_bits(u32 word, bool upper) {
  int codes = vx_permute(word, 0, upper ? 0x3a24 : 0x1804);
  return VX_DTYPE == VX_BF16 ? codes >> 4 & 0x87f087f0 : codes >> 1 & 0xbf80bf80;
}
VX_DEV u32 e4m3_pair(u32 word, bool upper) {
  const u32 power = VX_DTYPE == VX_BF16 ? 0x7b807b80u : 0x5c005c00u;  // 2^120, 2^8, twice
  return vx_fma2(e4m3_bits(word, upper), power, 0, elem());
}
VX_DEV u32 int8_pair(u32 word, bool upper) {
#if VX_DTYPE == VX_F16  // 1024 + 128 + code, less 1152
  u32 raised = __byte_perm(word ^ 0x80808080u, 0x64646464u, upper ? 0x4342 : 0x4140);
  return vx_fma2(raised, 0x3c003c00u, 0xe480e480u, elem());
#else
  float v[4];
  int8_floats(v, word);
  return upper ? pair_of(v[2], v[3]) : pair_of(v[0], v[1]);
#endif
}
#endif
