// Quantised weights, multiplied as they are: the kernel of each format, and the loop around it.
//
// A block of 16 rows holds its codes so that a vector is 16 rows of four bytes, one quad of columns;
// `units` are the columns that share a scale (K types: 256). block_layout.h has the offsets of each
// format, pack_blocks.cpp and pack_coded.cpp fill them. Where activations are rounded to int8, every
// instruction set repeats the exact integer sums of the codes.
#pragma once
#include "affine_blocks.h"
#include "float8_blocks.h"
#include "scaled_blocks.h"
#include "super_blocks.h"
#include "weight_fetch.h"

namespace vx {
namespace VX_ISA {

template <class Format, layout::Family FAMILY>
struct KindFor;
template <class Format>
struct KindFor<Format, layout::SCALED> {
  typedef ScaledBlocks<Format> type;
};
template <class Format>
struct KindFor<Format, layout::SUPER> {
  typedef SuperBlocks<Format> type;
};
template <class Format>
struct KindFor<Format, layout::AFFINE> {
  typedef AffineBlocks<Format> type;
};
template <class Format>
struct KindFor<Format, layout::FLOAT8> {
  typedef Float8Blocks type;
};
template <class Format>
using BlockKind = typename KindFor<Format, Format::FAMILY>::type;

// NR = MICRO_BLOCKS blocks of 16 rows times MB tokens, one block after the other, and in a unit one
// register of rows after the other: the codes of a unit fill the registers. Otherwise as `micro`.
template <class Kind, int NR, int MB>
static void micro_blocks(const uint8_t* w, size_t block_bytes, int32_t units, const uint8_t* panel,
                         float* c, const uint8_t* next) {
  // With more tokens the products are the bound, and requests among them cost registers.
  constexpr bool BESIDE = Kind::UNIT_COLS == 256 && MB < 6;
  typedef BesideUnit<Kind::UNIT_BYTES, 8> Beside;
  for (int r = 0; r < NR; ++r, w += block_bytes) {
    const uint8_t* next_block = next && r + 1 < NR ? w + block_bytes : next;
    NativeF acc[16 / NATIVE_LANES][MB];
#pragma GCC unroll 4
    for (int i = 0; i < 16 / NATIVE_LANES; ++i)
#pragma GCC unroll 16
      for (int t = 0; t < MB; ++t) acc[i][t] = splat_as(Tag<NativeF>(), 0.0f);
    const uint8_t* x = panel;
    for (int32_t u = 0; u < units; ++u, x += MB * (size_t)Kind::PANEL_BYTES) {
      if (next && !BESIDE) WeightFetch<Kind, 1>::before_unit(w, block_bytes, u, units, next_block);
#pragma GCC unroll 1
      for (int lane = 0; lane < 16; lane += NATIVE_LANES) {
        NativeF* sums = acc[lane / NATIVE_LANES];
        if constexpr (BESIDE)
          Kind::template multiply<MB>(sums, w, u, lane, x, Beside::of(w, block_bytes, u, lane == 0 ? next_block : nullptr));
        else
          Kind::template multiply<MB>(sums, w, u, units, lane, x);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16 / NATIVE_LANES; ++i)
#pragma GCC unroll 16
      for (int t = 0; t < MB; ++t) store_as(c + t * 32 + r * 16 + i * NATIVE_LANES, acc[i][t]);
  }
}

}  // namespace VX_ISA
}  // namespace vx
