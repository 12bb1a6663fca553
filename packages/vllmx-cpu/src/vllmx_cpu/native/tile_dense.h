// bf16 weights multiplied by AMX tiles. All row counts take this path: the tiles add the products of a
// pair of columns in another order than the vector instruction does. Denormals count as zero.
#pragma once
#include "tiles.h"

namespace vx {
namespace VX_ISA {

struct DenseTiles {
  enum { QUANTISED = 0, UNIT_COLS = 32, PANEL_BYTES = 64, STEPS = 16 };

  // Up to 32 activations as bf16, padded with zeros.
  static void round_unit(const float* x, int32_t left, uint8_t* out) {
    for (int i = 0; i < 32; i += 16) {
      const int n = left - i < 0 ? 0 : left - i < 16 ? left - i : 16;
      store_bf16((uint16_t*)out + i, load_n(x + i, n));
    }
  }
};

// Two blocks of 16 output rows times the tokens of a panel (more than 16 where HALVES is 2), `units` of
// 32 columns. c: [tokens][32] sums, taken from there first if `resume`. ahead: what to fetch into the
// cache meanwhile, laid out as the blocks; null for nothing.
template <int HALVES>
static void multiply_dense(const uint8_t* const* blocks, int32_t units, const uint8_t* x, int32_t tokens,
                           float* c, bool resume, const uint8_t* const* ahead) {
  if (resume) {
    VX_TILE_LOAD(0, c, 128);
    VX_TILE_LOAD(1, c + 16, 128);
    if (HALVES == 2) VX_TILE_LOAD(2, c + 512, 128);
    if (HALVES == 2) VX_TILE_LOAD(3, c + 528, 128);
  } else {
    VX_TILE_ZERO(0);
    VX_TILE_ZERO(1);
    if (HALVES == 2) VX_TILE_ZERO(2);
    if (HALVES == 2) VX_TILE_ZERO(3);
  }
  for (int32_t u = 0; u < units; ++u, x += (size_t)tokens * DenseTiles::PANEL_BYTES) {
    const size_t at = (size_t)u * TILE_BYTES;
    VX_TILE_LOAD(4, x, 64);
    VX_TILE_LOAD(6, blocks[0] + at, 64);
    VX_TILE_DOT("tdpbf16ps", 0, 4, 6);
    VX_TILE_LOAD(7, blocks[1] + at, 64);
    VX_TILE_DOT("tdpbf16ps", 1, 4, 7);
    if (HALVES == 2) {
      VX_TILE_LOAD(5, x + 16 * 64, 64);
      VX_TILE_DOT("tdpbf16ps", 2, 5, 6);
      VX_TILE_DOT("tdpbf16ps", 3, 5, 7);
    }
    if (!ahead) continue;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      prefetch(ahead[0] + at + i * 64);
      prefetch(ahead[1] + at + i * 64);
    }
  }
  VX_TILE_STORE(0, c, 128);
  VX_TILE_STORE(1, c + 16, 128);
  if (HALVES == 2) VX_TILE_STORE(2, c + 512, 128);
  if (HALVES == 2) VX_TILE_STORE(3, c + 528, 128);
}

}  // namespace VX_ISA
}  // namespace vx
