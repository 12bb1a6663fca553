// AMX tiles: registers of 16 rows of 64 bytes, and what multiplies them.
//
// C += A B: a row of A is a token's activations, 64 bytes along K; a row of B is one step of four
// bytes along K for 16 output rows, which is how packed weights lie in memory; C is 16 tokens by 16
// output rows. A product takes 16 cycles, 8 where C has at most 8 rows, however long K is, and a row of
// C depends on its row of A and on B alone.
//
// Measured on Emerald Rapids: a load takes half a cycle a row, a store 17 cycles and 14 of few rows, a
// sum is ready after 52. For hundreds of cycles after any of them port 5 takes no floating-point vector
// instruction, so that beside tiles there is one of those a cycle and not two; integer ones keep both.
//
// Tiles 0 ... 3 are sums, 4 and 5 tokens, 6 and 7 weights.
#pragma once
#include "simd.h"

namespace vx {
namespace VX_ISA {

enum { TILE_TOKENS = 32, TILE_BYTES = 1024 };  // tokens that one pass over a tile of weights serves

// The compiler's intrinsics do not tell it that a tile is loaded from memory: these do.
#define VX_TILE_LOAD(tile, base, stride)                                                        \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(base), "r"((int64_t)(stride)) : "memory")
#define VX_TILE_STORE(tile, base, stride)                                                       \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(base), "r"((int64_t)(stride)) : "memory")
#define VX_TILE_STORE_AT(tile, base, offset, stride)                                            \
  __asm__ volatile("tilestored %%tmm" #tile ", %c2(%0,%1,1)" ::"r"(base), "r"((int64_t)(stride)), \
                   "i"((int)(offset)) : "memory")
#define VX_TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
// product: tdpbf16ps, tdpbsud (A signed, B unsigned bytes) or tdpbssd
#define VX_TILE_DOT(product, c, a, b) __asm__ volatile(product " %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// The shapes of this thread's tiles, until the end of the scope.
class TileShapes {
 public:
  TileShapes() = default;
  TileShapes(const TileShapes&) = delete;
  ~TileShapes() { __asm__ volatile("tilerelease" ::); }

  // For `tokens` (1 ... 32), the first 16 in tiles 0, 1 and 4 and the others in 2, 3 and 5, of `steps`
  // (1 ... 16) times four bytes. Sums are lost when the shape changes.
  void set(int32_t tokens, int32_t steps) {
    const int32_t first = tokens < 16 ? tokens : 16;
    set(first, tokens - first, steps);
  }
  // The same for `first` and `second` (0 ... 16) rows.
  void set(int32_t first, int32_t second, int32_t steps) {
    if (first == first_ && second == second_ && steps == steps_) return;
    first_ = first, second_ = second, steps_ = steps;
    Config config = {};
    config.palette = 1;
    for (int tile = 0; tile < 6; ++tile) {
      const int32_t rows = tile < 2 || tile == 4 ? first : second;
      config.rows[tile] = (uint8_t)rows;
      config.row_bytes[tile] = (uint16_t)(rows == 0 ? 0 : tile < 4 ? 64 : steps * 4);
    }
    for (int tile = 6; tile < 8; ++tile) config.rows[tile] = (uint8_t)steps, config.row_bytes[tile] = 64;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }

  // For tile_attention.h: sums, queries and weights of `rows` (1 ... 16) rows.
  void set_attention(int32_t rows) {
    if (rows == first_) return;
    first_ = rows;
    Config config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) config.rows[tile] = (uint8_t)rows, config.row_bytes[tile] = 64;
    config.rows[5] = 16, config.rows[7] = 8, config.row_bytes[6] = 32;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }

 private:
  struct Config {
    uint8_t palette, start_row, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  int32_t first_ = 0, second_ = 0, steps_ = 0;
};

}  // namespace VX_ISA
}  // namespace vx
