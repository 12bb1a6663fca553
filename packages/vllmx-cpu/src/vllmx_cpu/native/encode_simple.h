// Blocks of 32 values: vllmx_models.formats.gguf.quantize.legacy in C++, with the same bytes.
#pragma once
#include "encode_blocks.h"

namespace vx {
namespace VX_ISA {
namespace encode {

// Where scale and offset of a block come before its codes.
VX_INLINE void put_nibbles(const Tile& tile, const Blocks& out, int offset) {
  put_planes<32, 16, 4>(out, offset,
                        [&](int i) { return whole(load(tile.codes + i * 16)) & splat_u32(15); });
}
VX_INLINE void put_fifth_bits(const Tile& tile, const Blocks& out, int offset) {
  U32x16 bits = splat_u32(0);
  for (int i = 0; i < 32; ++i) bits = bits | (whole(load(tile.codes + i * 16)) >> 4) << i;
  out.words(offset, bits);
}

// value = d * q with q in [low, high]; leaves q - low as codes and gives the bits of d.
template <int COUNT>
VX_INLINE U32x16 encode_symmetric(Tile& tile, float low, float high, const Spread<COUNT>& steps) {
  F32x16 reach = zero();
  for (int i = 0; i < 32; ++i) reach = max(reach, abs(load(tile.values + i * 16)));
  const F32x16 searched = f16(search_symmetric<32>(tile.values, low, high, steps));
  const F32x16 tried[3] = {searched, f16(splat((float)(1.0 / high)) * reach),
                           f16(searched * splat(1.0f + 0x1p-10f))};
  F32x16 scale = searched, least = zero();
  for (int t = 0; t < 3; ++t) {
    const F32x16 inverse_scale = inverse(tried[t]);
    F32x16 error = zero();
    for (int i = 0; i < 32; ++i) {
      const F32x16 x = load(tile.values + i * 16);
      const F32x16 e = codes_of(x, inverse_scale, low, high) * tried[t] - x;
      error = error + e * e;
    }
    if (t == 0) least = error;
    const I32x16 better = error < least;
    keep_better(better, &scale, tried[t]);
    keep_better(better, &least, error);
  }
  const F32x16 inverse_scale = inverse(scale);
  for (int i = 0; i < 32; ++i) {
    const F32x16 q = codes_of(load(tile.values + i * 16), inverse_scale, low, high);
    store(tile.codes + i * 16, q - splat(low));
    store(tile.found + i * 16, q * scale);
  }
  return half_bits(scale);
}

// value = d * q + m with q in [0, high]; writes d and m.
template <int COUNT>
VX_INLINE void encode_affine(Tile& tile, float high, const Spread<COUNT>& steps, const Blocks& out) {
  const Line line = AffineSearch<32>::run(tile.values, high, steps, true);
  const U32x16 scale_bits = half_bits(line.scale), offset_bits = half_bits(line.offset);
  const F32x16 scale = from_half(scale_bits), offset = from_half(offset_bits);
  const F32x16 inverse_scale = inverse(scale);
  for (int i = 0; i < 32; ++i) {
    const F32x16 q = codes_of(load(tile.values + i * 16) - offset, inverse_scale, 0, high);
    store(tile.codes + i * 16, q);
    store(tile.found + i * 16, q * scale + offset);
  }
  out.halves(0, scale_bits);
  out.halves(2, offset_bits);
}

// Each: values and bytes of a block, how far beyond float16's largest its values may go, the encoder.
struct EncodeQ8_0 {
  enum { VALUES = 32, BYTES = 34, REACH = 127 };
  static void run(Tile& tile, const Blocks& out) {
    static constexpr Spread<3> steps(-0.9, 0.9);
    out.halves(0, encode_symmetric(tile, -127, 127, steps));
    put_planes<32, 32, 8>(out, 2, [&](int i) {
      return (whole(load(tile.codes + i * 16)) - splat_u32(127)) & splat_u32(255);
    });
  }
};
struct EncodeQ4_0 {
  enum { VALUES = 32, BYTES = 18, REACH = 7 };
  static void run(Tile& tile, const Blocks& out) {
    static constexpr Spread<9> steps(-0.9, 0.9);
    out.halves(0, encode_symmetric(tile, -8, 7, steps));
    put_nibbles(tile, out, 2);
  }
};
struct EncodeQ5_0 {
  enum { VALUES = 32, BYTES = 22, REACH = 15 };
  static void run(Tile& tile, const Blocks& out) {
    static constexpr Spread<7> steps(-0.9, 0.9);
    out.halves(0, encode_symmetric(tile, -16, 15, steps));
    put_fifth_bits(tile, out, 2);
    put_nibbles(tile, out, 6);
  }
};
struct EncodeQ4_1 {
  enum { VALUES = 32, BYTES = 20, REACH = 1 };
  static void run(Tile& tile, const Blocks& out) {
    static constexpr Spread<9> steps(-0.9, 0.9);
    encode_affine(tile, 15, steps, out);
    put_nibbles(tile, out, 4);
  }
};
struct EncodeQ5_1 {
  enum { VALUES = 32, BYTES = 24, REACH = 1 };
  static void run(Tile& tile, const Blocks& out) {
    static constexpr Spread<7> steps(-0.9, 0.9);
    encode_affine(tile, 31, steps, out);
    put_fifth_bits(tile, out, 4);
    put_nibbles(tile, out, 8);
  }
};

}  // namespace encode
}  // namespace VX_ISA
}  // namespace vx
