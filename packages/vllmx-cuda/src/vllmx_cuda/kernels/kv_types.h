// How keys and values lie in the pages: as activations do, as FP8 e4m3, or as INT8 with one f32
// scale for each token and head.
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

// The scale of one head of one token from its greatest magnitude; returns what to multiply by.
VX_DEV float kv_scale(float top, float* scale, bool writes) {
  if (writes) *scale = top / 127.f;
  return top > 0.f ? 127.f / top : 0.f;
}

// N values into a page; `inverse` matters to INT8 alone.
template <int N> VX_DEV void kv_write(kv_elem* p, const float (&v)[N], float inverse) {
  Pack<kv_elem, N> pack;
#pragma unroll
  for (int i = 0; i < N; i++) {
#if VX_KV == VX_KV_ELEM
    pack.at[i] = from_float<elem>(v[i]);
#elif VX_KV == VX_KV_E4M3
    pack.at[i] = __nv_fp8_e4m3(v[i]);  // saturates at 448
#else
    pack.at[i] = (i8)__float2int_rn(v[i] * inverse);
#endif
  }
  store_pack(p, pack);
}

// N values out of a page, not yet multiplied by the scale of INT8.
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
