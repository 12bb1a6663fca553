// `linear` for one kind of weights: packed activations, chunks of weights, the micro kernel of micro.h.
//
// Weight layout: a tile is 32 output rows = two blocks of 16 rows; a block is [units][16 rows] of
// elements (bf16: [units][16][2], pairs of k; quantised: block_layout.h). Rows beyond N and the odd k
// beyond K hold zeros. A gated weight has gate rows in the first block of a tile and the matching up
// rows in the second.
#pragma once
#include "linear_output.h"
#include "micro.h"
#include "panels.h"
#include "weight_chunks.h"
#if defined(__AMX_INT8__)
#include "tile_linear.h"
#endif

namespace vx {
namespace VX_ISA {

enum { ONCE_BYTES = 64 << 10 };  // of weights that stream by, in a chunk

template <class Kind>
static void multiply(const VxLinear* a, Panels p, VxCtx* ctx) {
  const VxWeight* w = &a->w;
  const size_t block_bytes = (size_t)p.units * Kind::UNIT_BYTES, tile_bytes = 2 * block_bytes;
  const auto tile_data = [=](int32_t tile) { return (const uint8_t*)w->data + (size_t)tile * tile_bytes; };
  alignas(64) float c[MICRO_TOKENS * 32];
  // With one panel nothing is used twice: small chunks, so that the threads end together.
  const Chunks size = p.count > 1 ? Chunks{CHUNK_BYTES, 8} : Chunks{ONCE_BYTES, 8};
  for_chunks_ahead(w, tile_bytes, size, ctx, [&](int32_t first, int32_t last, int32_t next) {
    for (int32_t panel = 0; panel < p.count; ++panel) {
      const int32_t row = p.begin(panel), tokens = p.begin(panel + 1) - row;
      const uint8_t* x = p.base + (size_t)row * p.units * Kind::PANEL_BYTES;
      const Micro run = micro_for<Kind>(tokens);
      for (int32_t tile = first; tile < last; ++tile) {
        const int32_t then = tile + 1 < last ? tile + 1 : next < 0 ? tile : next;
        const uint8_t *block = tile_data(tile), *after = tile_data(then);
        for (int b = 0; b < 2; b += MICRO_BLOCKS, block += block_bytes) {
          const uint8_t* following = b + MICRO_BLOCKS < 2 ? block + block_bytes : after;
          run(block, block_bytes, p.units, x, c + b * 16, panel == 0 ? following : nullptr);
        }
        finish_tile(a, tile, row, tokens, c);
      }
    }
  });
}

template <class Kind>
static void run_linear(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  const int32_t count = (rows + MICRO_TOKENS - 1) / MICRO_TOKENS;
  multiply<Kind>(a, pack<Kind>(a, step, rows, (rows + count - 1) / count, ctx), ctx);
}

// For the quantised kinds of FAMILY; nothing happens for any other kind.
template <layout::Family FAMILY>
static void run_family(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  layout::visit_format(a->w.kind, 0, [=](auto format) {
    typedef decltype(format) Format;
    if constexpr (Format::FAMILY == FAMILY) {
#if defined(__AMX_INT8__)
      if (run_on_tiles<Format>(a, step, rows, ctx)) return 0;
#endif
      run_linear<BlockKind<Format>>(a, step, rows, ctx);
    }
    return 0;
  });
}

}  // namespace VX_ISA
}  // namespace vx
