// How keys and values lie in the pages: as activations do, or as codes of 8 bits, FP8 e4m3 or INT8,
// with one f32 scale for each token and head, (blocks, K, P).
#pragma once
#include "vx.h"

#define VX_KV_ELEM 0
#define VX_KV_E4M3 1
#define VX_KV_INT8 2
#ifndef VX_KV
#define VX_KV VX_KV_ELEM
#endif

#if VX_KV == VX_KV_ELEM
typedef elem kv_elem;
#elif VX_KV == VX_KV_E4M3
typedef __nv_fp8_e4m3 kv_elem;
#else
typedef i8 kv_elem;
#endif

#define VX_KV_SCALED (VX_KV != VX_KV_ELEM)

// How one vector, a key or value of one token and head, becomes codes: the rule of
// vllmx_core.kv_quant, to the bit.
struct CodeScale {
  float factor, scale;
  bool finite;
};

// top_bits: the greatest |x| of the vector as bits, which order floats and put NaN above all.
VX_DEV CodeScale code_scale(u32 top_bits) {
  const float limit = VX_KV == VX_KV_INT8 ? 127.f : 448.f;
  float top = __uint_as_float(top_bits);
  if (top_bits >= 0x7f800000u) return {0.f, __uint_as_float(0x7fc00000u), false};
  if (!(top > 1e-30f)) return {0.f, 0.f, true};
  return {__fdiv_rn(limit, top), __fdiv_rn(top, limit), true};
}

// N values into a page.
template <int N> VX_DEV void kv_write(kv_elem* p, const float (&v)[N], const CodeScale& code) {
  Pack<kv_elem, N> pack;
#pragma unroll
  for (int i = 0; i < N; i++) {
#if VX_KV == VX_KV_ELEM
    pack.at[i] = from_float<elem>(v[i]);
#else
    float scaled = code.finite ? __fmul_rn(v[i], code.factor) : 0.f;
#if VX_KV == VX_KV_E4M3
    pack.at[i] = __nv_fp8_e4m3(scaled);  // nearest, ties to even, 448 at most
#else
    pack.at[i] = (i8)__float2int_rn(scaled);
#endif
#endif
  }
  store_pack(p, pack);
}

// N values out of a page, not yet multiplied by their scale.
template <int N> VX_DEV void kv_unpack(float (&v)[N], const Pack<kv_elem, N>& pack) {
#pragma unroll
  for (int i = 0; i < N; i++) {
#if VX_KV == VX_KV_ELEM
    v[i] = to_float(pack.at[i]);
#else
    v[i] = (float)pack.at[i];
#endif
  }
}
