// One row out of a packed quantised matrix, as float32: what embedding tables need. The values are
// those of the file to the bit (ggml's order of operations).
#pragma once
#include "block_layout.h"
#include "simd.h"

namespace vx {
namespace VX_ISA {

VX_INLINE float half_at(const uint8_t* p) {
  uint16_t words[16] = {0};
  float lanes[16];
  __builtin_memcpy(words, p, 2);
  store(lanes, load_f16(words));
  return lanes[0];
}

// Code k of the 32 whose quads begin at p, which points to the row's lane.
VX_INLINE int nibble_at(const uint8_t* p, int k) { return p[k / 8 * 64 + k % 4] >> (k / 4 % 2 * 4) & 15; }

template <int BITS>
static void unpack_scaled(const uint8_t* block, int32_t lane, int32_t units, float* y) {
  typedef layout::Scaled<BITS> Layout;
  for (int32_t u = 0; u < units; ++u) {
    const uint8_t* codes = block + Layout::codes(u) + lane * 4;
    const float d = half_at(block + Layout::scale(u, units) + lane * 2);
    for (int k = 0; k < 32; ++k) {
      const int code = BITS == 8 ? codes[k / 4 * 64 + k % 4] : nibble_at(codes, k);
      *y++ = d * (float)(code - (1 << (BITS - 1)));
    }
  }
}

template <int BITS>
static void unpack_minima(const uint8_t* block, int32_t lane, int32_t units, float* y) {
  typedef layout::Minima<BITS> Layout;
  for (int32_t u = 0; u < units; ++u, block += Layout::UNIT_BYTES) {
    const float d = half_at(block + lane * 2), low_d = half_at(block + 32 + lane * 2);
    for (int g = 0; g < 8; ++g) {
      const size_t at = (size_t)(g / 4) * 64 + (size_t)lane * 4 + (size_t)(g % 4);
      const float scale = d * (float)block[Layout::SCALES + at];
      const float low = low_d * (float)block[Layout::MINIMA + at];
      for (int k = 0; k < 32; ++k) {
        int code = nibble_at(block + Layout::nibbles(g) + lane * 4, k);
        if (BITS == 5) code |= (block[Layout::fifth_bits(g) + lane * 4 + k % 4] >> (k / 4) & 1) << 4;
        *y++ = scale * (float)code - low;
      }
    }
  }
}

static void unpack_signed6(const uint8_t* block, int32_t lane, int32_t units, float* y) {
  typedef layout::Signed6 Layout;
  for (int32_t u = 0; u < units; ++u, block += Layout::UNIT_BYTES) {
    const float d = half_at(block + Layout::SCALE + lane * 2);
    const int8_t* scales = (const int8_t*)block + Layout::SCALES + lane * 4;
    for (int k = 0; k < 256; ++k) {
      const int g = k / 32, in_group = k % 32, quad = in_group / 4;
      const uint8_t* pairs = block + Layout::high_pairs(g) + quad / 4 * 64 + lane * 4;
      const int high = pairs[k % 4] >> (quad % 4 * 2) & 3;
      const int code = nibble_at(block + Layout::nibbles(g) + lane * 4, in_group) | high << 4;
      *y++ = d * (float)scales[k / 64 * 64 + k / 16 % 4] * (float)(code - 32);
    }
  }
}

// Row `row` of w into y (cols); w.kind is a VxBlockKind.
static void unpack_block_row(const VxWeight* w, int32_t row, float* y) {
  const int32_t units = w->cols / layout::unit_cols(w->kind), lane = row % 16;
  const size_t block_bytes = (size_t)units * layout::unit_bytes(w->kind);
  const uint8_t* block = (const uint8_t*)w->data + (size_t)(row / 16) * block_bytes;
  switch (w->kind) {
    case VX_Q8_0: return unpack_scaled<8>(block, lane, units, y);
    case VX_Q4_0: return unpack_scaled<4>(block, lane, units, y);
    case VX_Q4_K: return unpack_minima<4>(block, lane, units, y);
    case VX_Q5_K: return unpack_minima<5>(block, lane, units, y);
    case VX_Q6_K: return unpack_signed6(block, lane, units, y);
  }
}

}  // namespace VX_ISA
}  // namespace vx
