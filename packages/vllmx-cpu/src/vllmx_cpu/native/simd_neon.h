// One NEON register, which every 64-bit ARM processor has; see simd_native.h, and simd_avx512.h for
// what the functions do.
#pragma once

namespace vx {
namespace VX_ISA {

VX_INLINE NativeF splat_as(Tag<NativeF>, float x) { return (NativeF)vdupq_n_f32(x); }
VX_INLINE NativeI splat_as(Tag<NativeI>, int32_t x) { return (NativeI)vdupq_n_s32(x); }

VX_INLINE NativeI to_i32(NativeF v) { return (NativeI)vcvtnq_s32_f32((float32x4_t)v); }
VX_INLINE NativeF fma(NativeF a, NativeF b, NativeF c) {
  return (NativeF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
VX_INLINE NativeF max(NativeF a, NativeF b) { return a > b ? a : b; }  // FMAX would keep a NaN
VX_INLINE NativeF min(NativeF a, NativeF b) { return a < b ? a : b; }
VX_INLINE bool any(NativeI mask) { return vmaxvq_u32((uint32x4_t)mask) != 0; }

VX_INLINE NativeF load_f16_as(Tag<NativeF>, const uint16_t* p) {
  return (NativeF)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
VX_INLINE void store_f16(uint16_t* p, NativeF v) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
}
VX_INLINE NativeI load_i8_as(Tag<NativeI>, const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return (NativeI)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
}

}  // namespace VX_ISA
}  // namespace vx
