// How a vector of floats becomes codes of 8 bits with one scale: the greatest magnitude gets the
// greatest code. The rule of vllmx_core.kv_quant, to the bit.
#pragma once
#include "vx.h"

struct CodeScale {
  float factor, scale;
  bool finite;
};

// top_bits: the greatest |x| of the vector as bits, which order floats and put NaN above all.
VX_DEV CodeScale code_scale(u32 top_bits, float limit) {
  float top = __uint_as_float(top_bits);
  if (top_bits >= 0x7f800000u) return {0.f, __uint_as_float(0x7fc00000u), false};
  if (!(top > 1e-30f)) return {0.f, 0.f, true};
  return {__fdiv_rn(limit, top), __fdiv_rn(top, limit), true};
}
