// The inner loop of products of weights that are not quantised: one tile part of 16 * NR output rows times
// MB tokens, as micro.h says. dense_linear.h has the loops around it.
#pragma once
#include "micro.h"

namespace vx {
namespace VX_ISA {

struct WeightF32 {
  enum { QUANTISED = 0, UNIT_BYTES = 64, UNIT_COLS = 1, PANEL_BYTES = 4 };
  struct Loaded { F32x16 w; };
  VX_INLINE Loaded load_unit(const uint8_t* p) { return {load((const float*)p)}; }
  VX_INLINE F32x16 multiply(F32x16 acc, Loaded v, const uint8_t* x) {
    return fma(v.w, splat(*(const float*)x), acc);
  }
};

struct WeightF16 {
  enum { QUANTISED = 0, UNIT_BYTES = 32, UNIT_COLS = 1, PANEL_BYTES = 4 };
  struct Loaded { F32x16 w; };
  VX_INLINE Loaded load_unit(const uint8_t* p) { return {load_f16((const uint16_t*)p)}; }
  VX_INLINE F32x16 multiply(F32x16 acc, Loaded v, const uint8_t* x) {
    return fma(v.w, splat(*(const float*)x), acc);
  }
};

// bf16: where the machine multiplies pairs of bf16, the activations are rounded to bf16; elsewhere
// they stay float32, which costs no more there.
struct WeightBf16 {
#if defined(__AVX512BF16__)
  enum { QUANTISED = 0, UNIT_BYTES = 64, UNIT_COLS = 2, PANEL_BYTES = 4 };
  struct Loaded { U32x16 w; };
  VX_INLINE Loaded load_unit(const uint8_t* p) { return {load_u32(p)}; }
  VX_INLINE F32x16 multiply(F32x16 acc, Loaded v, const uint8_t* x) {
    return dot_bf16(acc, v.w, splat_u32(*(const uint32_t*)x));
  }
#else
  enum { QUANTISED = 0, UNIT_BYTES = 64, UNIT_COLS = 2, PANEL_BYTES = 8 };
  struct Loaded { F32x16 even, odd; };
  VX_INLINE Loaded load_unit(const uint8_t* p) {
    U32x16 pair = load_u32(p);
    return {as_f32(pair << 16), as_f32(pair & splat_u32(0xffff0000u))};
  }
  VX_INLINE F32x16 multiply(F32x16 acc, Loaded v, const uint8_t* x) {
    acc = fma(v.even, splat(((const float*)x)[0]), acc);
    return fma(v.odd, splat(((const float*)x)[1]), acc);
  }
#endif
};

// Lines of weights to ask for, one beside each unit.
struct Ahead {
  const uint8_t* at;
  int32_t lines;
};

constexpr Ahead NOTHING_AHEAD = {nullptr, 0};

// w: NR blocks, block_bytes apart. panel: [units][MB] activations. c: [MB][32] receives the sums, and has
// those of the units before if `resumes`. streams: these blocks may come from memory.
template <class Kind, int NR, int MB>
static void micro_dense(const uint8_t* w, size_t block_bytes, int32_t units, const uint8_t* panel, float* c,
                        bool resumes, bool streams, Ahead ahead) {
  F32x16 acc[NR][MB];
#pragma GCC unroll 16
  for (int r = 0; r < NR; ++r)
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t) acc[r][t] = resumes ? load(c + t * 32 + r * 16) : zero();
  for (int32_t u = 0; u < units; ++u) {
    typename Kind::Loaded v[NR];
#pragma GCC unroll 16
    for (int r = 0; r < NR; ++r) v[r] = Kind::load_unit(w + (size_t)r * block_bytes);
    if (streams) {
#pragma GCC unroll 16
      for (int r = 0; r < NR; ++r) __builtin_prefetch(w + (size_t)r * block_bytes + FETCH_AHEAD, 0, 3);
    }
    if (u < ahead.lines) __builtin_prefetch(ahead.at + (size_t)u * 64, 0, 2);
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t)
#pragma GCC unroll 16
      for (int r = 0; r < NR; ++r)
        acc[r][t] = Kind::multiply(acc[r][t], v[r], panel + t * (int)Kind::PANEL_BYTES);
    w += Kind::UNIT_BYTES;
    panel += MB * (int)Kind::PANEL_BYTES;
  }
#pragma GCC unroll 16
  for (int t = 0; t < MB; ++t)
#pragma GCC unroll 16
    for (int r = 0; r < NR; ++r) store(c + t * 32 + r * 16, acc[r][t]);
}

// The inner loop for a number of tokens from 1 to MICRO_TOKENS.
typedef void (*MicroDense)(const uint8_t*, size_t, int32_t, const uint8_t*, float*, bool, bool, Ahead);
template <class Kind, int MB = 1>
VX_INLINE MicroDense micro_dense_for(int tokens) {
  if constexpr (MB < MICRO_TOKENS) {
    if (tokens > MB) return micro_dense_for<Kind, MB + 1>(tokens);
  }
  return micro_dense<Kind, MICRO_BLOCKS, MB>;
}

}  // namespace VX_ISA
}  // namespace vx
