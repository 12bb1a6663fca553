// How a vector of floats becomes codes of 8 bits with one scale: the greatest magnitude gets the
// greatest code. The rule of vllmx_core.kv_dtypes, to the bit.
#pragma once
#include "vx.h"

// |x| as bits, which order floats and put NaN above all
VX_DEV u32 magnitude(float v) { return __float_as_uint(fabsf(v)); }
VX_DEV u32 warp_max_bits(u32 v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) v = max(v, __shfl_xor_sync(VX_ALL, v, lanes));
  return v;
}

// Scales of weights from one row of blocks to the next: whole fours, which cuBLASLt wants them in
VX_DEV int scales_pitch(int groups, int block_rows) { return block_rows > 1 ? (groups + 3) / 4 * 4 : groups; }

struct CodeScale {
  float factor, scale;
  bool finite;
};

// top_bits: the greatest magnitude of the vector.
VX_DEV CodeScale code_scale(u32 top_bits, float limit) {
  float top = __uint_as_float(top_bits);
  if (top_bits >= 0x7f800000u) return {0.f, __uint_as_float(0x7fc00000u), false};
  if (!(top > 1e-30f)) return {0.f, 0.f, true};
  return {__fdiv_rn(limit, top), __fdiv_rn(top, limit), true};
}
