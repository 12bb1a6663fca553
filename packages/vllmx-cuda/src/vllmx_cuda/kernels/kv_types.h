// How keys and values lie in the pages: as activations do, or as codes of 8 bits, FP8 e4m3 or INT8,
// with one f32 scale for each token and head, (blocks, K, P).
#pragma once
#include "code_scale.h"
#include "code_values.h"
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

// How one vector, a key or value of one token and head, becomes codes
VX_DEV CodeScale code_scale(u32 top_bits) {
  return code_scale(top_bits, VX_KV == VX_KV_INT8 ? 127.f : 448.f);
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
#if VX_KV == VX_KV_ELEM
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = to_float(pack.at[i]);
#else
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    float four[4];
    u32 word = 0;
#pragma unroll
    for (int j = 0; j < 4 && j < N; j++)
      word |= (u32)reinterpret_cast<const u8*>(&pack)[i + j] << 8 * j;
#if VX_KV == VX_KV_E4M3
    e4m3_floats(four, word);
#else
    int8_floats(four, word);
#endif
#pragma unroll
    for (int j = 0; j < 4 && j < N; j++) v[i + j] = four[j];
  }
#endif
}
