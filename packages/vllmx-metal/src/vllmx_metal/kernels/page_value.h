// Values of KV pages as float: plain numbers, int8 codes, or e4m3 codes as bytes.
// Included before the kernel's function; see the kernels beside it.

#ifdef __METAL_VERSION__
#include <metal_simdgroup_matrix>
#endif

template <typename S>
inline float page_value(S stored) {
  return float(stored);
}

// e4m3: one bit of sign, four of exponent (bias 7), three of mantissa; 0x7f and 0xff are NaN.
template <>
inline float page_value(uint8_t stored) {
  const uint exponent = (stored >> 3) & 15;
  const float mantissa = float(stored & 7);
  const float size = exponent == 0 ? mantissa * (1.0f / 512.0f)
                                   : (8.0f + mantissa) * metal::exp2(float(exponent) - 10.0f);
  const float value = (stored & 127) == 127 ? NAN : size;
  return stored & 128 ? -value : value;
}
