// Products of AMX tiles for attention: bf16 by bf16, added in float32.
#pragma once
#include "tiles.h"

#include <type_traits>

namespace vx {
namespace VX_ISA {

// Shapes of AttentionTiles: sums, 32 features of queries and of keys, 16 probabilities and values.
enum { TILE_SUM = 0, TILE_QUERY = 4, TILE_KEY = 5, TILE_WEIGHT = 6, TILE_VALUE = 7 };

template <int tile>
VX_INLINE void tile_load(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
VX_INLINE void tile_store(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
VX_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int c, int a, int b>
VX_INLINE void tile_dot() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

// Calls f with a constant 0 ... n - 1.
template <int n, class F>
VX_INLINE void unrolled(F f) {
  if constexpr (n > 0) {
    unrolled<n - 1>(f);
    f(std::integral_constant<int, n - 1>());
  }
}

// Where a block of 16 rows has its tile of a step: a + block * a_block + step * a_step, and its sums:
// c[column] + block * c_block. Strides are bytes from row to row.
struct TileOperands {
  const uint8_t* a;
  int64_t a_block, a_step, a_stride;
  int64_t b_stride, c_block, c_stride;
};

// `blocks` blocks of rows times `columns` tiles of 16 columns, b(step, column), summed over the steps
// first ... last - 1.
template <int blocks, int columns, int a_tile, int b_tile, class B>
VX_INLINE void multiply_tiles(const TileOperands& o, int first, int last, B b, float* const* c) {
  unrolled<blocks * columns>([&](auto i) { tile_zero<TILE_SUM + i.value>(); });
  for (int s = first; s < last; ++s) {
    const uint8_t* a = o.a + s * o.a_step;
    if constexpr (blocks == 1) {
      tile_load<a_tile>(a, o.a_stride);
      unrolled<columns>([&](auto column) {
        tile_load<b_tile>(b(s, column.value), o.b_stride);
        tile_dot<TILE_SUM + column.value, a_tile, b_tile>();
      });
    } else {
      unrolled<columns>([&](auto column) {
        tile_load<b_tile>(b(s, column.value), o.b_stride);
        unrolled<blocks>([&](auto block) {
          tile_load<a_tile>(a + block.value * o.a_block, o.a_stride);
          tile_dot<TILE_SUM + block.value * columns + column.value, a_tile, b_tile>();
        });
      });
    }
  }
  unrolled<blocks>([&](auto block) {
    unrolled<columns>([&](auto column) {
      tile_store<TILE_SUM + block.value * columns + column.value>(c[column.value] + block.value * o.c_block,
                                                                  o.c_stride);
    });
  });
}

}  // namespace VX_ISA
}  // namespace vx
