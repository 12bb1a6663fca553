// Values of a checkpoint as float32, sixteen at a time.
#pragma once
#include "encode.h"
#include "encode_blocks.h"

namespace vx {
namespace VX_ISA {
namespace encode {

struct Source {
  const void* data;
  int32_t kind;   // VxDType
  int64_t first;

  // Values first + k and on; lanes beyond `left` are 0.
  inline __attribute__((always_inline)) F32x16 at(int64_t k, int64_t left = 16) const {
    if (kind == VX_F32) {
      const float* floats = (const float*)data + first + k;
      return left < 16 ? load_n(floats, (int)left) : load(floats);
    }
    const uint16_t* words = (const uint16_t*)data + first + k;
    uint16_t some[16] = {0};
    if (left < 16) {
      __builtin_memcpy(some, words, (size_t)left * 2);
      words = some;
    }
    return kind == VX_F16 ? load_f16(words) : load_bf16(words);
  }
};

// Greatest magnitudes, and whether all values were finite.
struct Reach {
  F32x16 magnitude, nothing;  // 0 in every lane until a value is not finite

  inline __attribute__((always_inline)) void add(F32x16 x) {
    magnitude = max(abs(x), magnitude);
    nothing = nothing + (x - x);
  }
  bool finite() const { return !any(nothing != nothing); }
};

}  // namespace encode
}  // namespace VX_ISA
}  // namespace vx
