// Values of KV pages as float: plain numbers, int8 codes, e4m3 codes as bytes, or codes of 4 bits; and what a
// window shows.
// Included before the kernel's function; see the kernels beside it.

#ifdef __METAL_VERSION__
#include <metal_simdgroup_matrix>
#endif

template <typename S>
inline float page_value(S stored) {
  return float(stored);
}

// The first position that a token sees, see `AttentionSpec.reach`.
template <int reach>
inline uint first_seen(uint position) {
  if (reach < 0) {
    return position - position % uint(-reach);
  }
  return reach > 0 && position >= uint(reach) ? position + 1 - uint(reach) : 0;
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

// Number d of a vector of D in pages where each number has a place of its own, or half a byte.
template <bool nibbles, uint D, typename Buffer>
inline float page_number(Buffer pages, ulong vector, uint d) {
  if (nibbles) {
    const uint byte = uint(pages[(vector * D + d) / 2]);
    return float(2 * int((byte >> (4 * (d % 2))) & 15) - 15);
  }
  return page_value(pages[vector * D + d]);
}
