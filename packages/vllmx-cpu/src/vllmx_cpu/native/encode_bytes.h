// Rows as int8 or float8 (e4m3) with one scale each: vllmx_models.quantization.eight_bits in C++, with
// the same bytes.
#pragma once
#include "encode_source.h"

namespace vx {
namespace VX_ISA {
namespace encode {

// Whole numbers of magnitude 127 or less.
struct Int8 {
  static constexpr float MOST = 127.0f;
  VX_INLINE U32x16 codes(F32x16 x) { return whole(nearest(x)); }
};

// Nearest e4m3, ties to even; magnitudes up to 448.
struct Float8 {
  static constexpr float MOST = 448.0f;
  VX_INLINE U32x16 codes(F32x16 x) {
    const U32x16 bits = as_u32(x), magnitude = bits & splat_u32(0x7fffffff);
    const U32x16 odd = (magnitude >> 20) & splat_u32(1);
    const U32x16 normal = ((magnitude + splat_u32(0x7ffff) + odd) >> 20) - splat_u32((127 - 7) << 3);
    const U32x16 subnormal = whole(nearest(as_f32(magnitude) * splat(512.0f)));
    const I32x16 small = as_i32(magnitude) < splat_i32(121 << 23);  // below 2^-6
    return select(small, subnormal, normal) | (bits >> 24 & splat_u32(0x80));
  }
};

// The greatest of a row in magnitude becomes Type::MOST.
template <class Type>
static int32_t encode_rows(VxEncode* job) {
  const int32_t cols = job->cols;
  for (int64_t row = 0; row < job->rows; ++row) {
    const Source source = {job->source, job->source_kind, row * cols};
    Reach reach = {zero(), zero()};
    for (int32_t k = 0; k < cols; k += 16) reach.add(source.at(k, cols - k));
    if (!reach.finite()) return -1;
    const float scale = reduce_max(reach.magnitude) / Type::MOST;
    job->scales[row] = scale;
    const F32x16 by = splat(scale > 1e-37f ? scale : 1.0f);
    for (int32_t k = 0; k < cols; k += 16) {
      const F32x16 x = scale > 1e-37f ? source.at(k, cols - k) / by : zero();
      uint8_t codes[16];
      store_u8(codes, Type::codes(x));
      __builtin_memcpy(job->out + row * cols + k, codes, (size_t)(cols - k < 16 ? cols - k : 16));
    }
  }
  return 0;
}

}  // namespace encode
}  // namespace VX_ISA
}  // namespace vx
