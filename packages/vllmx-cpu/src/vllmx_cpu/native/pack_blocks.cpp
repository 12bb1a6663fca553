// Repacks rows of GGUF blocks into the blocks of 16 rows that block_kinds.h reads: the same codes and
// scales, in another order. Runs once, at load.
#include "block_layout.h"
#include "team.h"

using namespace vx::layout;

namespace {

// 32 codes of one row to its lane of eight vectors, or of four where two share a byte.
void write_codes(uint8_t* out, const uint8_t* codes) {
  for (int j = 0; j < 8; ++j) __builtin_memcpy(out + j * 64, codes + j * 4, 4);
}
void write_nibbles(uint8_t* out, const uint8_t* codes) {
  for (int j = 0; j < 4; ++j)
    for (int b = 0; b < 4; ++b)
      out[j * 64 + b] = (uint8_t)((codes[j * 8 + b] & 15) | (codes[j * 8 + 4 + b] & 15) << 4);
}
// Bit 4 of 32 codes: bit j of a byte belongs to quad j.
void write_fifth_bits(uint8_t* out, const uint8_t* codes) {
  for (int b = 0; b < 4; ++b) {
    int bits = 0;
    for (int j = 0; j < 8; ++j) bits |= (codes[j * 4 + b] >> 4 & 1) << j;
    out[b] = (uint8_t)bits;
  }
}
// Bits 4 and 5 of 32 codes: bits 2j of vector i belong to quad 4i + j.
void write_high_pairs(uint8_t* out, const uint8_t* codes) {
  for (int i = 0; i < 2; ++i)
    for (int b = 0; b < 4; ++b) {
      int bits = 0;
      for (int j = 0; j < 4; ++j) bits |= (codes[i * 16 + j * 4 + b] >> 4 & 3) << (2 * j);
      out[i * 64 + b] = (uint8_t)bits;
    }
}

// Each of these: one source block as unit u of the block of 16 rows at `block`, row `lane` of it.
// f16 d | 32 int8
void pack_q8_0(const uint8_t* in, uint8_t* block, int32_t u, int32_t units, int32_t lane) {
  uint8_t codes[32];
  for (int k = 0; k < 32; ++k) codes[k] = in[2 + k] ^ 0x80;
  write_codes(block + Scaled<8>::codes(u) + lane * 4, codes);
  __builtin_memcpy(block + Scaled<8>::scale(u, units) + lane * 2, in, 2);
}
// f16 d | 16 bytes: the low nibbles are the first 16 codes
void pack_q4_0(const uint8_t* in, uint8_t* block, int32_t u, int32_t units, int32_t lane) {
  uint8_t codes[32];
  for (int k = 0; k < 16; ++k) codes[k] = in[2 + k] & 15, codes[k + 16] = in[2 + k] >> 4;
  write_nibbles(block + Scaled<4>::codes(u) + lane * 4, codes);
  __builtin_memcpy(block + Scaled<4>::scale(u, units) + lane * 2, in, 2);
}
// f16 d | f16 dmin | 12 bytes of 6-bit scales and minima | (Q5_K: 32 bytes of fifth bits) | nibbles
template <int BITS>
void pack_minima(const uint8_t* in, uint8_t* block, int32_t u, int32_t, int32_t lane) {
  typedef Minima<BITS> Layout;
  uint8_t* unit = block + (size_t)u * Layout::UNIT_BYTES;
  const uint8_t *packed = in + 4, *fifth = in + 16, *nibbles = in + (BITS == 5 ? 48 : 16);
  __builtin_memcpy(unit + lane * 2, in, 2);
  __builtin_memcpy(unit + 32 + lane * 2, in + 2, 2);
  for (int i = 0; i < 4; ++i) {
    uint8_t *scales = unit + Layout::SCALES + lane * 4, *minima = unit + Layout::MINIMA + lane * 4;
    scales[i] = packed[i] & 63;
    minima[i] = packed[4 + i] & 63;
    scales[64 + i] = (uint8_t)((packed[8 + i] & 15) | (packed[i] >> 6) << 4);
    minima[64 + i] = (uint8_t)(packed[8 + i] >> 4 | (packed[4 + i] >> 6) << 4);
  }
  for (int g = 0; g < 8; ++g) {
    uint8_t codes[32];
    for (int k = 0; k < 32; ++k) {
      codes[k] = nibbles[g / 2 * 32 + k] >> (g % 2 * 4) & 15;
      if (BITS == 5) codes[k] |= (uint8_t)((fifth[k] >> g & 1) << 4);
    }
    write_nibbles(unit + Layout::nibbles(g) + lane * 4, codes);
    if (BITS == 5) write_fifth_bits(unit + Layout::fifth_bits(g) + lane * 4, codes);
  }
}
// 128 bytes of nibbles | 64 bytes of high pairs | 16 signed scales | f16 d
void pack_q6_k(const uint8_t* in, uint8_t* block, int32_t u, int32_t, int32_t lane) {
  uint8_t* unit = block + (size_t)u * Signed6::UNIT_BYTES;
  __builtin_memcpy(unit + Signed6::SCALE + lane * 2, in + 208, 2);
  for (int i = 0; i < 4; ++i)
    __builtin_memcpy(unit + Signed6::SCALES + i * 64 + lane * 4, in + 192 + i * 4, 4);
  for (int g = 0; g < 8; ++g) {
    const int half = g / 4, part = g % 4;
    uint8_t codes[32];
    for (int k = 0; k < 32; ++k) {
      const int low = in[half * 64 + part % 2 * 32 + k] >> (part / 2 * 4) & 15;
      const int high = in[128 + half * 32 + k] >> (part * 2) & 3;
      codes[k] = (uint8_t)(low | high << 4);
    }
    write_nibbles(unit + Signed6::nibbles(g) + lane * 4, codes);
    write_high_pairs(unit + Signed6::high_pairs(g) + lane * 4, codes);
  }
}

struct Packer {
  size_t source_bytes;  // of a block in the file
  void (*pack)(const uint8_t* in, uint8_t* block, int32_t u, int32_t units, int32_t lane);
};

Packer packer_of(int32_t kind) {
  switch (kind) {
    case VX_Q8_0: return {34, pack_q8_0};
    case VX_Q4_0: return {18, pack_q4_0};
    case VX_Q4_K: return {144, pack_minima<4>};
    case VX_Q5_K: return {176, pack_minima<5>};
    case VX_Q6_K: return {210, pack_q6_k};
  }
  return {0, nullptr};
}

}  // namespace

// As vx_pack_rows, from rows of GGUF blocks of the same kind (VxBlockKind).
VX_API void vx_pack_blocks(void* packed, int32_t kind, int32_t cols, int32_t features, const void* source,
                           int32_t first, int32_t count) {
  const Packer packer = packer_of(kind);
  const int32_t units = cols / unit_cols(kind);
  const size_t block_bytes = (size_t)units * unit_bytes(kind);
  const uint8_t* in = (const uint8_t*)source;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t r = first + i, half = features > 0 && r >= features, local = r - half * features;
    const int32_t block = features > 0 ? local / 16 * 2 + half : r / 16;
    uint8_t* out = (uint8_t*)packed + (size_t)block * block_bytes;
    for (int32_t u = 0; u < units; ++u, in += packer.source_bytes)
      packer.pack(in, out, u, units, local % 16);
  }
}
