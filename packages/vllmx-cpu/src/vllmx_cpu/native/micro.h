// The inner loops of `linear`: one tile part of 16 * NR output rows times MB tokens.
//
// Weights come 16 rows interleaved, so that a lane is an output row and a token's activation is
// broadcast. A `unit` is the step along K: one k for f32 and f16, a pair of k for bf16. Every
// (row, token) is one accumulator that walks K from front to back, whatever NR and MB are: this, and
// nothing else, makes a row's bits independent of the batch around it.
#pragma once
#include "block_kinds.h"
#if defined(__AVX512VNNI__)
#include "micro_pairs.h"
#endif

namespace vx {
namespace VX_ISA {

// Blocks of 16 rows and tokens that one call keeps in registers.
#if VX_NATIVE_BYTES == 64
enum { MICRO_BLOCKS = 2, MICRO_TOKENS = 12 };  // 24 accumulators + 2 weights + 1 broadcast of 32
#elif VX_NATIVE_BYTES == 32
enum { MICRO_BLOCKS = 1, MICRO_TOKENS = 6 };   // 12 + 2 + 1 of 16
#elif defined(__aarch64__)
enum { MICRO_BLOCKS = 1, MICRO_TOKENS = 6 };   // 24 + 4 + 1 of 32
#else
enum { MICRO_BLOCKS = 1, MICRO_TOKENS = 2 };   // 8 + 4 + 1 of 16
#endif

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

// w: NR blocks, block_bytes apart. panel: [units][MB] activations. c: [MB][32] receives the sums.
// next: the blocks that are used after these, to be fetched into the cache meanwhile; null: all are there.
template <class Kind, int NR, int MB>
static void micro(const uint8_t* w, size_t block_bytes, int32_t units, const uint8_t* panel, float* c,
                  const uint8_t* next) {
  F32x16 acc[NR][MB];
#pragma GCC unroll 16
  for (int r = 0; r < NR; ++r)
#pragma GCC unroll 16
    for (int t = 0; t < MB; ++t) acc[r][t] = zero();
  for (int32_t u = 0; u < units; ++u) {
    typename Kind::Loaded v[NR];
#pragma GCC unroll 16
    for (int r = 0; r < NR; ++r) v[r] = Kind::load_unit(w + (size_t)r * block_bytes);
    if (next) {
#pragma GCC unroll 16
      for (int r = 0; r < NR; ++r) __builtin_prefetch(w + (size_t)r * block_bytes + FETCH_AHEAD, 0, 3);
    }
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

typedef void (*Micro)(const uint8_t*, size_t, int32_t, const uint8_t*, float*, const uint8_t*);

// The micro kernel for a number of tokens from 1 to MOST.
template <class Kind, int MOST, int MB = 1>
VX_INLINE Micro micro_for(int tokens) {
  if constexpr (MB < MOST) {
    if (tokens > MB) return micro_for<Kind, MOST, MB + 1>(tokens);
  }
#if defined(__AVX512VNNI__)
  if constexpr (ONE_SUM<Kind>) return micro_pairs<Kind, MB>;
#endif
  if constexpr (Kind::QUANTISED)
    return micro_blocks<Kind, MICRO_BLOCKS, MB>;
  else
    return micro<Kind, MICRO_BLOCKS, MB>;
}

}  // namespace VX_ISA
}  // namespace vx
