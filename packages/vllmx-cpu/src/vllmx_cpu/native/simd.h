// Sixteen lanes of float as one type, for every instruction set that we compile for.
//
// F32x16, I32x16 and U32x16 are one AVX-512 register, two AVX2 registers or four SSE2 / NEON ones: a
// `Twice` of halves, down to the native vector (simd_native.h). The operators + - * / & | ^ ~ << >> and
// the comparisons (lanes of 0 or -1) work on all of them, so that a kernel is written once and
// compiled once per instruction set. What pays for an intrinsic has one: fma, min, max, conversions,
// the bf16 dot product.
//
// Bits: nothing here depends on how many rows or threads there are. Reductions add lanes i and i + 8,
// then i + 4, i + 2, i + 1, on every instruction set. Compile with -ffp-contract=off: a multiply-add
// is fused where `fma` is written and nowhere else.
#pragma once
#include "simd_native.h"

namespace vx {
namespace VX_ISA {

template <class H>
struct Twice {
  H lo, hi;
};

template <class Native, int bytes>
struct Widen {
  typedef Twice<typename Widen<Native, bytes / 2>::type> type;
};
template <class Native>
struct Widen<Native, VX_NATIVE_BYTES> {
  typedef Native type;
};

typedef Widen<NativeF, 64>::type F32x16;
typedef Widen<NativeI, 64>::type I32x16;
typedef Widen<NativeU, 64>::type U32x16;

#define VX_BINARY(op)                                                                    \
  template <class H>                                                                     \
  VX_INLINE auto operator op(Twice<H> a, Twice<H> b)->Twice<decltype(a.lo op b.lo)> {    \
    return {a.lo op b.lo, a.hi op b.hi};                                                 \
  }
VX_BINARY(+)
VX_BINARY(-)
VX_BINARY(*)
VX_BINARY(/)
VX_BINARY(&)
VX_BINARY(|)
VX_BINARY(^)
#undef VX_BINARY

// A comparison's lanes are `long` where that has 32 bits (Windows).
template <class V>
VX_INLINE NativeI mask_of(V lanes) { return (NativeI)lanes; }
template <class H>
VX_INLINE Twice<H> mask_of(Twice<H> lanes) { return lanes; }
#define VX_COMPARE(op)                                                                          \
  template <class H>                                                                            \
  VX_INLINE auto operator op(Twice<H> a, Twice<H> b)->Twice<decltype(mask_of(a.lo op b.lo))> {  \
    return {mask_of(a.lo op b.lo), mask_of(a.hi op b.hi)};                                      \
  }
VX_COMPARE(<)
VX_COMPARE(>)
VX_COMPARE(<=)
VX_COMPARE(>=)
VX_COMPARE(==)
VX_COMPARE(!=)
#undef VX_COMPARE
template <class H>
VX_INLINE Twice<H> operator-(Twice<H> a) { return {-a.lo, -a.hi}; }
template <class H>
VX_INLINE Twice<H> operator~(Twice<H> a) { return {~a.lo, ~a.hi}; }
template <class H>
VX_INLINE Twice<H> operator<<(Twice<H> a, int n) { return {a.lo << n, a.hi << n}; }
template <class H>
VX_INLINE Twice<H> operator>>(Twice<H> a, int n) { return {a.lo >> n, a.hi >> n}; }

// --- making vectors: a tag argument picks the overload, `splat` and `load` hide it --------------
VX_INLINE NativeU splat_as(Tag<NativeU>, uint32_t x) {
  return (NativeU)splat_as(Tag<NativeI>(), (int32_t)x);
}
template <class H, class S>
VX_INLINE Twice<H> splat_as(Tag<Twice<H>>, S x) {
  return {splat_as(Tag<H>(), x), splat_as(Tag<H>(), x)};
}
VX_INLINE F32x16 splat(float x) { return splat_as(Tag<F32x16>(), x); }
VX_INLINE I32x16 splat_i32(int32_t x) { return splat_as(Tag<I32x16>(), x); }
VX_INLINE U32x16 splat_u32(uint32_t x) { return splat_as(Tag<U32x16>(), x); }
VX_INLINE F32x16 zero() { return splat(0.0f); }

// Native vector by native vector: GCC copies a whole `Twice` through the stack, in smaller pieces than
// it is read back in, and the read waits for them.
template <class V>
struct Memory {
  VX_INLINE V load(const uint8_t* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  VX_INLINE void store(uint8_t* p, V v) { __builtin_memcpy(p, &v, sizeof v); }
};
template <class H>
struct Memory<Twice<H>> {
  VX_INLINE Twice<H> load(const uint8_t* p) {
    return {Memory<H>::load(p), Memory<H>::load(p + sizeof(H))};
  }
  VX_INLINE void store(uint8_t* p, Twice<H> v) {
    Memory<H>::store(p, v.lo);
    Memory<H>::store(p + sizeof(H), v.hi);
  }
};
template <class V>
VX_INLINE V load_as(const void* p) { return Memory<V>::load((const uint8_t*)p); }
template <class V>
VX_INLINE void store_as(void* p, V v) { Memory<V>::store((uint8_t*)p, v); }
VX_INLINE F32x16 load(const float* p) { return load_as<F32x16>(p); }
VX_INLINE I32x16 load_i32(const void* p) { return load_as<I32x16>(p); }
VX_INLINE U32x16 load_u32(const void* p) { return load_as<U32x16>(p); }
VX_INLINE void store(float* p, F32x16 v) { store_as(p, v); }
VX_INLINE void store_i32(void* p, I32x16 v) { store_as(p, v); }
VX_INLINE void store_u32(void* p, U32x16 v) { store_as(p, v); }

// The first n (0 ... 16) lanes; the others read as 0 and are not written.
VX_INLINE F32x16 load_n(const float* p, int n) {
#if VX_NATIVE_BYTES == 64
  return (F32x16)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  float lanes[16] = {0};
  __builtin_memcpy(lanes, p, (size_t)n * 4);
  return load(lanes);
#endif
}
VX_INLINE void store_n(float* p, F32x16 v, int n) {
#if VX_NATIVE_BYTES == 64
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
  float lanes[16];
  store(lanes, v);
  __builtin_memcpy(p, lanes, (size_t)n * 4);
#endif
}

// Lane numbers 0 ... 15, and the mask of the first n lanes.
VX_INLINE I32x16 lane_index() {
  static const int32_t index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_i32(index);
}
VX_INLINE I32x16 first_lanes(int n) { return lane_index() < splat_i32(n); }

// --- reinterpreting and converting ---------------------------------------------------------------
VX_INLINE NativeU as_u32(NativeF v) { return (NativeU)v; }
VX_INLINE NativeU as_u32(NativeI v) { return (NativeU)v; }
VX_INLINE NativeI as_i32(NativeF v) { return (NativeI)v; }
VX_INLINE NativeI as_i32(NativeU v) { return (NativeI)v; }
VX_INLINE NativeF as_f32(NativeI v) { return (NativeF)v; }
VX_INLINE NativeF as_f32(NativeU v) { return (NativeF)v; }
template <class H>
VX_INLINE auto as_u32(Twice<H> v) -> Twice<decltype(as_u32(v.lo))> { return {as_u32(v.lo), as_u32(v.hi)}; }
template <class H>
VX_INLINE auto as_i32(Twice<H> v) -> Twice<decltype(as_i32(v.lo))> { return {as_i32(v.lo), as_i32(v.hi)}; }
template <class H>
VX_INLINE auto as_f32(Twice<H> v) -> Twice<decltype(as_f32(v.lo))> { return {as_f32(v.lo), as_f32(v.hi)}; }

VX_INLINE NativeF to_f32(NativeI v) { return __builtin_convertvector(v, NativeF); }
template <class H>
VX_INLINE auto to_i32(Twice<H> v) -> Twice<decltype(to_i32(v.lo))> { return {to_i32(v.lo), to_i32(v.hi)}; }
template <class H>
VX_INLINE auto to_f32(Twice<H> v) -> Twice<decltype(to_f32(v.lo))> { return {to_f32(v.lo), to_f32(v.hi)}; }

// mask lanes are 0 or -1: a where set, b elsewhere.
VX_INLINE NativeF select(NativeI mask, NativeF a, NativeF b) { return mask ? a : b; }
VX_INLINE NativeI select(NativeI mask, NativeI a, NativeI b) { return mask ? a : b; }
VX_INLINE NativeU select(NativeI mask, NativeU a, NativeU b) { return mask ? a : b; }
template <class M, class H>
VX_INLINE Twice<H> select(Twice<M> mask, Twice<H> a, Twice<H> b) {
  return {select(mask.lo, a.lo, b.lo), select(mask.hi, a.hi, b.hi)};
}

// --- arithmetic ----------------------------------------------------------------------------------
template <class H>
VX_INLINE Twice<H> fma(Twice<H> a, Twice<H> b, Twice<H> c) {
  return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}
template <class H>
VX_INLINE Twice<H> max(Twice<H> a, Twice<H> b) { return {max(a.lo, b.lo), max(a.hi, b.hi)}; }
template <class H>
VX_INLINE Twice<H> min(Twice<H> a, Twice<H> b) { return {min(a.lo, b.lo), min(a.hi, b.hi)}; }
VX_INLINE F32x16 abs(F32x16 v) { return as_f32(as_u32(v) & splat_u32(0x7fffffffu)); }
// |magnitude| with the sign of `sign`.
VX_INLINE F32x16 copysign(F32x16 magnitude, F32x16 sign) {
  U32x16 top = splat_u32(0x80000000u);
  return as_f32((as_u32(magnitude) & ~top) | (as_u32(sign) & top));
}

// --- reductions over the 16 lanes, in a fixed tree -------------------------------------------------
template <class H>
VX_INLINE float reduce_add(Twice<H> v) { return reduce_add(v.lo + v.hi); }
// NaN lanes may be lost: check for them elsewhere where it matters.
template <class H>
VX_INLINE float reduce_max(Twice<H> v) { return reduce_max(max(v.lo, v.hi)); }
template <class H>
VX_INLINE bool any(Twice<H> mask) { return any(mask.lo | mask.hi); }

// --- 16-bit floats ---------------------------------------------------------------------------------
VX_INLINE NativeU load_words_as(Tag<NativeU>, const uint16_t* p) {
  return __builtin_convertvector(load_as<NativeHalfWords>(p), NativeU);
}
VX_INLINE void store_words(uint16_t* p, NativeU v) {
  NativeHalfWords words = __builtin_convertvector(v, NativeHalfWords);
  __builtin_memcpy(p, &words, sizeof words);
}
template <class H>
VX_INLINE Twice<H> load_words_as(Tag<Twice<H>>, const uint16_t* p) {
  return {load_words_as(Tag<H>(), p), load_words_as(Tag<H>(), p + sizeof(H) / 4)};
}
template <class H>
VX_INLINE void store_words(uint16_t* p, Twice<H> v) {
  store_words(p, v.lo);
  store_words(p + sizeof(H) / 4, v.hi);
}
// Sixteen 16-bit words, zero-extended; and the low halves of 16 lanes.
VX_INLINE U32x16 load_u16(const uint16_t* p) { return load_words_as(Tag<U32x16>(), p); }
VX_INLINE void store_u16(uint16_t* p, U32x16 v) { store_words(p, v); }

VX_INLINE F32x16 load_bf16(const uint16_t* p) { return as_f32(load_u16(p) << 16); }
// Nearest, ties to even; NaN stays NaN. The low 16 bits of each lane are the bf16. (The AVX512-BF16
// instruction flushes denormals; this does not.)
VX_INLINE U32x16 bf16_bits(F32x16 v) {
  U32x16 bits = as_u32(v);
  U32x16 rounded = (bits + splat_u32(0x7fff) + ((bits >> 16) & splat_u32(1))) >> 16;
  return select(v == v, rounded, splat_u32(0x7fc0));
}
VX_INLINE void store_bf16(uint16_t* p, F32x16 v) { store_u16(p, bf16_bits(v)); }
VX_INLINE float bf16_to_float(uint16_t word) {
  uint32_t bits = (uint32_t)word << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
VX_INLINE uint16_t float_to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return value == value ? (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

template <class H>
VX_INLINE Twice<H> load_f16_as(Tag<Twice<H>>, const uint16_t* p) {
  return {load_f16_as(Tag<H>(), p), load_f16_as(Tag<H>(), p + sizeof(H) / 4)};
}
template <class H>
VX_INLINE void store_f16(uint16_t* p, Twice<H> v) {
  store_f16(p, v.lo);
  store_f16(p + sizeof(H) / 4, v.hi);
}
VX_INLINE F32x16 load_f16(const uint16_t* p) { return load_f16_as(Tag<F32x16>(), p); }

// --- bytes -----------------------------------------------------------------------------------------
template <class H>
VX_INLINE Twice<H> load_i8_as(Tag<Twice<H>>, const int8_t* p) {
  return {load_i8_as(Tag<H>(), p), load_i8_as(Tag<H>(), p + sizeof(H) / 4)};
}
VX_INLINE void store_bytes(uint8_t* p, NativeU v) {
  NativeBytes bytes = __builtin_convertvector((NativeI)v, NativeBytes);
  __builtin_memcpy(p, &bytes, sizeof bytes);
}
template <class H>
VX_INLINE void store_bytes(uint8_t* p, Twice<H> v) {
  store_bytes(p, v.lo);
  store_bytes(p + sizeof(H) / 4, v.hi);
}
// Sixteen bytes, sign-extended; and the low bytes of 16 lanes.
VX_INLINE I32x16 load_i8(const int8_t* p) { return load_i8_as(Tag<I32x16>(), p); }
VX_INLINE void store_u8(uint8_t* p, U32x16 v) { store_bytes(p, v); }

// One lane = two bf16 (low half first). acc[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]; products are
// exact in float32, sums are rounded as the instruction set does it.
VX_INLINE F32x16 dot_bf16(F32x16 acc, U32x16 a, U32x16 b) {
#if defined(__AVX512BF16__)
  return (F32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
  U32x16 high = splat_u32(0xffff0000u);
  acc = fma(as_f32(a << 16), as_f32(b << 16), acc);
  return fma(as_f32(a & high), as_f32(b & high), acc);
#endif
}

// --- transcendental functions ----------------------------------------------------------------------
// Relative error under 2e-7 for results that are normal floats; 0 below about -87.3, inf above 88.7.
VX_INLINE F32x16 exp(F32x16 x) {
  F32x16 bounded = min(max(x, splat(-87.33654f)), splat(88.72283f));
  I32x16 n = to_i32(bounded * splat(1.44269504f));
  F32x16 whole = to_f32(n);
  F32x16 r = fma(whole, splat(-0.693359375f), bounded);  // ln 2 in two parts
  r = fma(whole, splat(2.12194440e-4f), r);
  F32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  F32x16 value = fma(p * r, r, r + splat(1.0f));
  // 2^n in two factors: n = 128 alone would overflow.
  I32x16 half = n >> 1;
  F32x16 scale_a = as_f32((half + splat_i32(127)) << 23);
  F32x16 scale_b = as_f32((n - half + splat_i32(127)) << 23);
  value = value * scale_a * scale_b;
  value = select(x < splat(-87.33654f), zero(), value);
  value = select(x > splat(88.72283f), splat(__builtin_inff()), value);
  return select(x == x, value, x);
}

VX_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace VX_ISA
}  // namespace vx
