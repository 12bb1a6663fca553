// The vector of one register: its types, and the functions that each instruction set says in its own
// way (simd_avx512.h, simd_avx2.h, simd_sse2.h, simd_neon.h have the same list). GCC's and Clang's
// vector extensions say the rest.
#pragma once
#include "vx.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VX_NATIVE_BYTES 64
#elif defined(__AVX2__)
#define VX_NATIVE_BYTES 32
#else
#define VX_NATIVE_BYTES 16
#endif

#define VX_INLINE static inline __attribute__((always_inline))

namespace vx {
namespace VX_ISA {

enum { NATIVE_LANES = VX_NATIVE_BYTES / 4 };
typedef float NativeF __attribute__((vector_size(VX_NATIVE_BYTES)));
typedef int32_t NativeI __attribute__((vector_size(VX_NATIVE_BYTES)));
typedef uint32_t NativeU __attribute__((vector_size(VX_NATIVE_BYTES)));
typedef uint16_t NativeHalfWords __attribute__((vector_size(VX_NATIVE_BYTES / 2)));
typedef int8_t NativeBytes __attribute__((vector_size(VX_NATIVE_BYTES / 4)));
typedef float Quad __attribute__((vector_size(16)));

template <class V>
struct Tag {};

// (v0 + v2) + (v1 + v3): the last steps of every sum over lanes.
VX_INLINE float reduce_add(Quad v) { return (v[0] + v[2]) + (v[1] + v[3]); }
VX_INLINE float reduce_max(Quad v) {
  float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}

}  // namespace VX_ISA
}  // namespace vx

#if VX_NATIVE_BYTES == 64
#include "simd_avx512.h"
#elif VX_NATIVE_BYTES == 32
#include "simd_avx2.h"
#elif defined(__x86_64__)
#include "simd_sse2.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#error "x86-64 and 64-bit ARM are supported"
#endif
