// Repacks rows of GGUF blocks, and of safetensors' MXFP4, into the blocks of 16 rows that block_kinds.h
// reads: the same codes and scales, in another order. Runs once, at load.
#include "block_layout.h"
#include "team.h"

using namespace vx::layout;

namespace {

// Each `pack`: one source block as unit u of the block of 16 rows at `block`, row `lane` of it.

// 32 codes of four bits: the low nibbles of 16 bytes, then the high ones.
void read_nibbles(const uint8_t* in, uint8_t* codes) {
  for (int k = 0; k < 16; ++k) codes[k] = in[k] & 15, codes[k + 16] = in[k] >> 4;
}
template <class Format>
void write_scaled(uint8_t* block, int32_t u, int32_t units, int32_t lane, const uint8_t* codes,
                  const uint8_t* scale) {
  Codes<Format::BITS>::write(block + Format::codes(u) + lane * 4, codes);
  __builtin_memcpy(block + Format::scale(u, units) + lane * 2, scale, 2);
  if constexpr (Format::OFFSET == MINIMUM)
    __builtin_memcpy(block + Format::minimum(u, units) + lane * 2, scale + 2, 2);
}

// f16 d | 32 int8
void pack_bytes(const uint8_t* in, uint8_t* block, int32_t u, int32_t units, int32_t lane) {
  uint8_t codes[32];
  for (int k = 0; k < 32; ++k) codes[k] = in[2 + k] ^ 0x80;
  write_scaled<Q8_0>(block, u, units, lane, codes, in);
}
// f16 d | (f16 m) | (4 bytes of fifth bits) | 16 bytes of nibbles
template <class Format>
void pack_nibbles(const uint8_t* in, uint8_t* block, int32_t u, int32_t units, int32_t lane) {
  const uint8_t* high = in + (Format::OFFSET == MINIMUM ? 4 : 2);
  uint8_t codes[32];
  read_nibbles(high + (Format::BITS == 5 ? 4 : 0), codes);
  if (Format::BITS == 5)
    for (int k = 0; k < 32; ++k) codes[k] |= (uint8_t)((high[k / 8] >> (k % 8) & 1) << 4);
  write_scaled<Format>(block, u, units, lane, codes, in);
}
// The scale 2^(e - 128) as bf16, the two smallest being subnormal.
uint16_t mxfp4_scale(uint8_t e) { return (uint16_t)(e < 2 ? 0x20 << e : (e - 1) << 7); }
// exponent | 16 bytes of nibbles
void pack_mxfp4(const uint8_t* in, uint8_t* block, int32_t u, int32_t units, int32_t lane) {
  uint8_t codes[32];
  read_nibbles(in + 1, codes);
  const uint16_t scale = mxfp4_scale(in[0]);
  write_scaled<MXFP4>(block, u, units, lane, codes, (const uint8_t*)&scale);
}

// Eight codes in order, a nibble each, as a plane of Codes<4> has them: the fifth beside the first.
uint32_t nibbles_of_plane(uint32_t w) {
  w = (w & 0xff0000ff) | (w & 0x0000ff00) << 8 | (w & 0x00ff0000) >> 8;
  return (w & 0xf00ff00f) | (w & 0x00f000f0) << 4 | (w & 0x0f000f00) >> 4;
}

// A byte for group g of the row into a vector of group scales or minima.
uint8_t* group_byte(uint8_t* vectors, int g, int32_t lane) { return vectors + g / 4 * 64 + lane * 4 + g % 4; }

// f16 d | f16 dmin | 12 bytes of 6-bit scales and minima | (Q5_K: 32 bytes of fifth bits) | nibbles
template <class Format>
void pack_minima(const uint8_t* in, uint8_t* block, int32_t u, int32_t, int32_t lane) {
  uint8_t* unit = block + (size_t)u * Format::UNIT_BYTES;
  const uint8_t *packed = in + 4, *fifth = in + 16, *nibbles = in + (Format::BITS == 5 ? 48 : 16);
  __builtin_memcpy(unit + Format::SCALE + lane * 2, in, 2);
  __builtin_memcpy(unit + Format::SCALE + 32 + lane * 2, in + 2, 2);
  for (int i = 0; i < 4; ++i) {
    uint8_t *scales = unit + Format::SCALES, *minima = unit + Format::MINIMA;
    *group_byte(scales, i, lane) = packed[i] & 63;
    *group_byte(minima, i, lane) = packed[4 + i] & 63;
    *group_byte(scales, 4 + i, lane) = (uint8_t)((packed[8 + i] & 15) | (packed[i] >> 6) << 4);
    *group_byte(minima, 4 + i, lane) = (uint8_t)(packed[8 + i] >> 4 | (packed[4 + i] >> 6) << 4);
  }
  for (int g = 0; g < 8; ++g) {
    uint8_t codes[32];
    for (int k = 0; k < 32; ++k) {
      codes[k] = nibbles[g / 2 * 32 + k] >> (g % 2 * 4) & 15;
      if (Format::BITS == 5) codes[k] |= (uint8_t)((fifth[k] >> g & 1) << 4);
    }
    Codes<Format::BITS>::write(unit + Format::codes(g) + lane * 4, codes);
  }
}
// 128 bytes of nibbles | 64 bytes of high pairs | 16 signed scales | f16 d
void pack_q6_k(const uint8_t* in, uint8_t* block, int32_t u, int32_t, int32_t lane) {
  uint8_t* unit = block + (size_t)u * Q6_K::UNIT_BYTES;
  __builtin_memcpy(unit + Q6_K::SCALE + lane * 2, in + 208, 2);
  for (int g = 0; g < 16; ++g) *group_byte(unit + Q6_K::SCALES, g, lane) = in[192 + g];
  for (int g = 0; g < 8; ++g) {
    const int half = g / 4, part = g % 4;
    uint8_t codes[32];
    for (int k = 0; k < 32; ++k) {
      const int low = in[half * 64 + part % 2 * 32 + k] >> (part / 2 * 4) & 15;
      const int high = in[128 + half * 32 + k] >> (part * 2) & 3;
      codes[k] = (uint8_t)(low | high << 4);
    }
    Codes<6>::write(unit + Q6_K::codes(g) + lane * 4, codes);
  }
}
// Group g of 32 codes whose two low bits lie in 64 bytes: four planes in each half.
int low_pair(const uint8_t* in, int g, int k) { return in[g / 4 * 32 + k] >> (g % 4 * 2) & 3; }

// 16 bytes scale | minimum << 4 | 64 bytes of pairs | f16 d | f16 dmin
void pack_q2_k(const uint8_t* in, uint8_t* block, int32_t u, int32_t, int32_t lane) {
  uint8_t* unit = block + (size_t)u * Q2_K::UNIT_BYTES;
  __builtin_memcpy(unit + Q2_K::SCALE + lane * 2, in + 80, 2);
  __builtin_memcpy(unit + Q2_K::SCALE + 32 + lane * 2, in + 82, 2);
  for (int g = 0; g < 16; ++g) *group_byte(unit + Q2_K::SCALES, g, lane) = in[g];
  for (int g = 0; g < 8; ++g) {
    uint8_t codes[32];
    for (int k = 0; k < 32; ++k) codes[k] = (uint8_t)low_pair(in + 16, g, k);
    Codes<2>::write(unit + Q2_K::codes(g) + lane * 4, codes);
  }
}
// 32 bytes of third bits | 64 bytes of pairs | 12 bytes of 6-bit scales (8 of nibbles, 4 of pairs) | f16 d
void pack_q3_k(const uint8_t* in, uint8_t* block, int32_t u, int32_t, int32_t lane) {
  uint8_t* unit = block + (size_t)u * Q3_K::UNIT_BYTES;
  __builtin_memcpy(unit + Q3_K::SCALE + lane * 2, in + 108, 2);
  for (int g = 0; g < 16; ++g) {
    const int low = in[96 + g % 8] >> (g / 8 * 4) & 15, high = in[104 + g % 4] >> (g / 4 * 2) & 3;
    *group_byte(unit + Q3_K::SCALES, g, lane) = (uint8_t)((low | high << 4) - 32);
  }
  for (int g = 0; g < 8; ++g) {
    uint8_t codes[32];
    for (int k = 0; k < 32; ++k)
      codes[k] = (uint8_t)(low_pair(in + 32, g, k) | (in[k] >> g & 1) << 2);
    Codes<3>::write(unit + Q3_K::codes(g) + lane * 4, codes);
  }
}
// f16 d | 2 bytes of high pairs of scales | 4 bytes of their nibbles | 8 times 16 bytes of nibbles
void pack_iq4_xs(const uint8_t* in, uint8_t* block, int32_t u, int32_t, int32_t lane) {
  uint8_t* unit = block + (size_t)u * IQ4_XS::UNIT_BYTES;
  __builtin_memcpy(unit + IQ4_XS::SCALE + lane * 2, in, 2);
  for (int g = 0; g < 8; ++g) {
    const int low = in[4 + g / 2] >> (g % 2 * 4) & 15, high = in[2 + g / 4] >> (g % 4 * 2) & 3;
    *group_byte(unit + IQ4_XS::SCALES, g, lane) = (uint8_t)((low | high << 4) - 32);
    uint8_t codes[32];
    read_nibbles(in + 8 + g * 16, codes);
    Codes<4>::write(unit + IQ4_XS::codes(g) + lane * 4, codes);
  }
}

struct Packer {
  size_t source_bytes;  // of a block in the file
  void (*pack)(const uint8_t* in, uint8_t* block, int32_t u, int32_t units, int32_t lane);
};

Packer packer_of(int32_t kind) {
  switch (kind) {
    case VX_Q8_0: return {34, pack_bytes};
    case VX_Q4_0: return {18, pack_nibbles<Q4_0>};
    case VX_Q4_1: return {20, pack_nibbles<Q4_1>};
    case VX_Q5_0: return {22, pack_nibbles<Q5_0>};
    case VX_Q5_1: return {24, pack_nibbles<Q5_1>};
    case VX_IQ4_NL: return {18, pack_nibbles<IQ4_NL>};
    case VX_MXFP4: return {17, pack_mxfp4};
    case VX_Q2_K: return {84, pack_q2_k};
    case VX_Q3_K: return {110, pack_q3_k};
    case VX_Q4_K: return {144, pack_minima<Q4_K>};
    case VX_Q5_K: return {176, pack_minima<Q5_K>};
    case VX_Q6_K: return {210, pack_q6_k};
    case VX_IQ4_XS: return {136, pack_iq4_xs};
  }
  return {0, nullptr};
}

}  // namespace

// As vx_pack_rows, from rows of GGUF blocks of the same kind (VxBlockKind).
VX_API void vx_pack_blocks(void* packed, int32_t kind, int32_t cols, int32_t features, const void* source,
                           int32_t first, int32_t count) {
  const Packer packer = packer_of(kind);
  const int32_t units = units_of(kind, cols);
  const uint8_t* in = (const uint8_t*)source;
  for (int32_t i = 0; i < count; ++i) {
    const Place place = place_of(first + i, features);
    uint8_t* block = (uint8_t*)packed + (size_t)place.block * block_bytes(kind, cols);
    for (int32_t u = 0; u < units; ++u, in += packer.source_bytes)
      packer.pack(in, block, u, units, place.lane);
  }
}

// The same for MXFP4 as safetensors have it: codes (count, cols / 2), two neighbours to a byte, and exponents
// (count, cols / 32) of which the last one, 255, means NaN. `cols` is a multiple of 32.
VX_API void vx_pack_mxfp4(void* packed, int32_t cols, int32_t features, const uint8_t* codes,
                          const uint8_t* exponents, int32_t first, int32_t count) {
  const int32_t units = cols / 32;
  for (int32_t i = 0; i < count; ++i) {
    const Place place = place_of(first + i, features);
    uint8_t* block = (uint8_t*)packed + (size_t)place.block * block_bytes(VX_MXFP4, cols);
    for (int32_t u = 0; u < units; ++u, codes += 16, ++exponents) {
      uint32_t words[4];
      __builtin_memcpy(words, codes, 16);
      for (int j = 0; j < 4; ++j) words[j] = nibbles_of_plane(words[j]);
      for (int j = 0; j < 4; ++j)
        __builtin_memcpy(block + MXFP4::codes(u) + j * 64 + place.lane * 4, words + j, 4);
      const uint16_t scale = *exponents == 255 ? 0x7fc0 : mxfp4_scale(*exponents);
      __builtin_memcpy(block + MXFP4::scale(u, units) + place.lane * 2, &scale, 2);
    }
  }
}
