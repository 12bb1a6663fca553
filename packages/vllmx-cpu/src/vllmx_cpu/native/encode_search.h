// Scales of small groups of values by search, for sixteen groups at a time: one in each lane.
//
// This is vllmx_models.formats.gguf.quantize.search, operation by operation: sums run over a group's values in
// their order, nothing is fused, and so every instruction set makes the same bytes as numpy does. A
// group lies in memory as `G` vectors, value after value.
#pragma once
#include "simd.h"

namespace vx {
namespace VX_ISA {
namespace encode {

const float F16_MAX = 65504.0f;

// Equal steps from `first` to `last`, as numpy.linspace rounds them.
template <int COUNT>
struct Spread {
  float at[COUNT];
  constexpr Spread(double first, double last) : at() {
    const double step = (last - first) / (COUNT - 1);
    for (int i = 0; i < COUNT; ++i) at[i] = (float)(i * step + first);
    at[COUNT - 1] = (float)last;
  }
};

// 1 / scale; 0 for 0.
VX_INLINE F32x16 inverse(F32x16 scale) {
  return select(abs(scale) > splat(1e-30f), splat(1.0f) / scale, zero());
}
// To the nearest integer, ties to even; magnitudes below 2^22.
VX_INLINE F32x16 nearest(F32x16 x) { return (x + splat(12582912.0f)) - splat(12582912.0f); }
VX_INLINE F32x16 clip(F32x16 x, float low, float high) { return min(max(x, splat(low)), splat(high)); }
// The codes within [low, high] that are nearest to value / scale.
VX_INLINE F32x16 codes_of(F32x16 value, F32x16 inverse_scale, float low, float high) {
  return nearest(clip(value * inverse_scale, low, high));
}

VX_INLINE F32x16 from_half(U32x16 bits) {
  uint16_t words[16];
  store_u16(words, bits);
  return load_f16(words);
}
// Bits of the nearest float16, the largest finite one instead of infinity.
VX_INLINE U32x16 half_bits(F32x16 x) {
  uint16_t words[16];
  store_f16(words, clip(x, -F16_MAX, F16_MAX));
  return load_u16(words);
}
VX_INLINE F32x16 f16(F32x16 x) { return from_half(half_bits(x)); }
// The nearest float16 that is no smaller in magnitude, up to the largest.
VX_INLINE F32x16 f16_not_below(F32x16 x) {
  const U32x16 bits = half_bits(x);
  const I32x16 magnitude = as_i32(bits & splat_u32(0x7fff));
  const I32x16 away = (abs(from_half(bits)) < abs(x)) & (magnitude < splat_i32(0x7bff));
  return from_half(as_u32(as_i32(bits) - away));  // a lane that is set counts as -1
}

VX_INLINE void keep_better(I32x16 better, F32x16* kept, F32x16 found) { *kept = select(better, found, *kept); }

// Scales d for value = d * q with q in [low, high], low = -high - 1 or -high.
template <int G, int COUNT>
VX_INLINE F32x16 search_symmetric(const float* values, float low, float high, const Spread<COUNT>& steps) {
  F32x16 extreme = load(values), reach = abs(extreme), least = extreme * extreme;
  for (int g = 1; g < G; ++g) {
    const F32x16 x = load(values + g * 16);
    const I32x16 further = abs(x) > reach;
    keep_better(further, &extreme, x);
    reach = max(reach, abs(x));
    least = least + x * x;
  }
  const F32x16 unit = inverse(extreme);
  F32x16 best = zero();
  for (int i = 0; i < COUNT; ++i)
    for (int end = low == -high; end < 2; ++end) {
      const float target = end ? high - steps.at[i] : low + steps.at[i];
      const F32x16 inverse_scale = unit * splat(target);
      float found[G * 16];
      F32x16 squares = zero(), product = zero();
      for (int g = 0; g < G; ++g) {
        const F32x16 x = load(values + g * 16), q = codes_of(x, inverse_scale, low, high);
        store(found + g * 16, q);
        squares = squares + q * q;
        product = product + q * x;
      }
      const F32x16 scale = product * inverse(squares);
      F32x16 error = zero();
      for (int g = 0; g < G; ++g) {
        const F32x16 e = load(found + g * 16) * scale - load(values + g * 16);
        error = error + e * e;
      }
      const I32x16 better = error < least;
      keep_better(better, &best, scale);
      keep_better(better, &least, error);
    }
  return best;
}

struct Line {
  F32x16 scale, offset;
};

// (d, m) for value = d * q + m with q in [0, high], d >= 0; unless `any_sign`, m <= 0.
template <int G>
struct AffineSearch {
  const float* values;
  float high;
  bool any_sign;
  F32x16 total, least;
  Line best;

  template <int COUNT>
  VX_INLINE Line run(const float* values, float high, const Spread<COUNT>& steps, bool any_sign) {
    F32x16 bottom = load(values), top = bottom, total = bottom;
    for (int g = 1; g < G; ++g) {
      const F32x16 x = load(values + g * 16);
      bottom = min(bottom, x);
      top = max(top, x);
      total = total + x;
    }
    F32x16 mean = total / splat(G);
    if (!any_sign) bottom = min(bottom, zero()), mean = min(mean, zero());
    AffineSearch search = {values, high, any_sign, total, level_error(values, bottom), {zero(), bottom}};
    const F32x16 error = level_error(values, mean);
    const I32x16 better = error < search.least;
    keep_better(better, &search.best.offset, mean);
    keep_better(better, &search.least, error);
    const F32x16 unit = inverse(top - bottom);
    for (int i = 0; i < COUNT; ++i) search.consider(unit * splat(high + steps.at[i]), bottom);
    for (int i = 0; i < 2; ++i) search.consider(inverse(search.best.scale), search.best.offset);
    return search.best;
  }

  VX_INLINE F32x16 level_error(const float* values, F32x16 level) {
    F32x16 error = zero();
    for (int g = 0; g < G; ++g) {
      const F32x16 e = level - load(values + g * 16);
      error = error + e * e;
    }
    return error;
  }

  // The line of least squares through the codes that this scale and offset give.
  inline __attribute__((always_inline)) void consider(F32x16 inverse_scale, F32x16 start) {
    float found[G * 16];
    F32x16 linear = zero(), squares = zero(), product = zero();
    for (int g = 0; g < G; ++g) {
      const F32x16 x = load(values + g * 16), q = codes_of(x - start, inverse_scale, 0, high);
      store(found + g * 16, q);
      linear = linear + q;
      squares = squares + q * q;
      product = product + q * x;
    }
    const F32x16 count = splat(G), determinant = count * squares - linear * linear;
    F32x16 scale = (count * product - total * linear) * inverse(determinant);
    F32x16 offset = (total - scale * linear) / count;
    if (!any_sign) {
      const I32x16 through_zero = offset > zero();
      scale = select(through_zero, product * inverse(squares), scale);
      offset = select(through_zero, zero(), offset);
    }
    F32x16 error = zero();
    for (int g = 0; g < G; ++g) {
      const F32x16 e = (load(found + g * 16) * scale + offset) - load(values + g * 16);
      error = error + e * e;
    }
    const I32x16 better = (error < least) & (scale > zero());
    keep_better(better, &best.scale, scale);
    keep_better(better, &best.offset, offset);
    keep_better(better, &least, error);
  }
};

}  // namespace encode
}  // namespace VX_ISA
}  // namespace vx
