// `linear` for one kind of weights: packed activations, chunks of weights, the micro kernel of micro.h.
//
// Weight layout: a tile is 32 output rows = two blocks of 16 rows; a block is [units][16 rows] of
// elements (bf16: [units][16][2], pairs of k; quantised: block_layout.h). Rows beyond N and the odd k
// beyond K hold zeros. A gated weight has gate rows in the first block of a tile and the matching up
// rows in the second.
#pragma once
#include "linear_output.h"
#include "micro.h"
#if defined(__AVX512VNNI__)
#include "micro_super.h"
#endif
#include "panels.h"
#include "weight_chunks.h"
#if defined(__AMX_INT8__)
#include "tile_linear.h"
#endif

namespace vx {
namespace VX_ISA {

#if !defined(__AMX_INT8__)
template <class Format>
static constexpr int32_t TILES_FROM = INT32_MAX;  // rows
#endif

enum { ONCE_BYTES = 64 << 10 };  // of weights that stream by, in a chunk

// Calls product(tile's weights, a panel's activations, tokens, the weights to fetch meanwhile or null) for
// all tiles and panels; it leaves [tokens][32] sums in c.
template <class Kind, class Product>
VX_INLINE void multiply(const VxLinear* a, Panels p, VxCtx* ctx, const float* c, Product product) {
  const VxWeight* w = &a->w;
  const size_t tile_bytes = 2 * (size_t)p.units * Kind::UNIT_BYTES;
  const auto tile_data = [=](int32_t tile) { return (const uint8_t*)w->data + (size_t)tile * tile_bytes; };
  // With one panel nothing is used twice: small chunks, so that the threads end together.
  const Chunks size = p.count > 1 ? Chunks{CHUNK_BYTES, 8} : Chunks{ONCE_BYTES, 8};
  for_chunks_ahead(w, tile_bytes, size, ctx, [&](int32_t first, int32_t last, int32_t next) {
    for (int32_t panel = 0; panel < p.count; ++panel) {
      const int32_t row = p.begin(panel), tokens = p.begin(panel + 1) - row;
      const uint8_t* x = p.base + (size_t)row * p.units * Kind::PANEL_BYTES;
      for (int32_t tile = first; tile < last; ++tile) {
        const int32_t then = tile + 1 < last ? tile + 1 : next < 0 ? tile : next;
        product(tile_data(tile), x, tokens, panel == 0 ? tile_data(then) : nullptr);
        finish_tile(a, tile, row, tokens, c);
      }
    }
  });
}

// Up to MOST tokens at a time.
template <class Kind, int MOST = MICRO_TOKENS>
static void run_linear(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  const int32_t count = (rows + MOST - 1) / MOST;
  const Panels p = pack<Kind>(a, step, rows, (rows + count - 1) / count, ctx);
  const size_t block_bytes = (size_t)p.units * Kind::UNIT_BYTES;
  alignas(64) float c[MOST * 32];
  const auto product = [&](const uint8_t* w, const uint8_t* x, int32_t tokens, const uint8_t* next) {
    const Micro run = micro_for<Kind, MOST>(tokens);
    for (int b = 0; b < 2; b += MICRO_BLOCKS, w += block_bytes)
      run(w, block_bytes, p.units, x, c + b * 16, next && b + MICRO_BLOCKS < 2 ? w + block_bytes : next);
  };
  multiply<Kind>(a, p, ctx, c, product);
}

#if defined(__AVX512VNNI__)
// Many rows of a K type; true if they were many enough.
template <class Format>
static bool run_super_pairs(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  typedef SuperPairs<Format> Pairs;
  typedef typename Pairs::Blocks Kind;
  if (rows < Pairs::FROM_TOKENS) return false;
  const int32_t count = (rows + Pairs::TOKENS - 1) / Pairs::TOKENS;
  const Panels p = pack<Kind>(a, step, rows, (rows + count - 1) / count, ctx);
  const size_t block_bytes = (size_t)p.units * Kind::UNIT_BYTES;
  alignas(64) float c[Pairs::TOKENS * 32];
  const auto product = [&](const uint8_t* w, const uint8_t* x, int32_t tokens, const uint8_t* next) {
    Pairs::run(w, block_bytes, p.units, x, tokens, c, next);
  };
  multiply<Kind>(a, p, ctx, c, product);
  return true;
}
#endif

// For the quantised kinds of FAMILY; nothing happens for any other kind.
template <layout::Family FAMILY>
static void run_family(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  layout::visit_format(a->w.kind, 0, [=](auto format) {
    typedef decltype(format) Format;
    if constexpr (Format::FAMILY == FAMILY) {
      constexpr int32_t FEWER = TILES_FROM<Format> - 1;  // rows
#if defined(__AMX_INT8__)
      if (rows > FEWER) return run_on_tiles<Format>(a, step, rows, ctx), 0;
#endif
#if defined(__AVX512VNNI__)
      if constexpr (FAMILY == layout::SUPER)
        if constexpr (FEWER >= SuperPairs<Format>::FROM_TOKENS)
          if (run_super_pairs<Format>(a, step, rows, ctx)) return 0;
#endif
      // A kernel for each number of tokens makes a large library: there are only those that can be called.
      if constexpr (FEWER > 0)
        run_linear<BlockKind<Format>, FEWER < MICRO_TOKENS ? FEWER : (int32_t)MICRO_TOKENS>(a, step, rows, ctx);
    }
    return 0;
  });
}

}  // namespace VX_ISA
}  // namespace vx
