// Products of weights that are not quantised.
//
// With one panel the weights stream past it. Where a few panels pass by a chunk of tiles, memory would
// stand still while all but the first do, and it is the bound up to some 24 rows: so beside each panel a
// share of the next chunk is asked for, into the second-level cache, which holds both.
//
// With many panels the inner loop is the bound. Columns are cut into spans, so that a panel's part of one
// stays in the first-level cache while the tiles pass by, and the tiles' part of it in the second-level one
// while the panels do; sums of earlier spans wait beside. A sum walks K from front to back all the same.
#pragma once
#include "micro_dense.h"
#include "micro_linear.h"

namespace vx {
namespace VX_ISA {

template <class Kind>
struct DenseKernel {
  enum { SPAN_UNITS = 2048 / (int)Kind::PANEL_BYTES, GROUP_PANELS = 16 };
  enum { PASSES = 2 / MICRO_BLOCKS, SUMS = MICRO_TOKENS * 32 };  // of a tile and a panel

  static Panels shape(const Product& a) { return even_panels<Kind>(a, MICRO_TOKENS); }

  static void multiply(const Product& a, const Panels& p, TileRange tiles, uint8_t* scratch) {
    if (!kernel.again.groups(p.count)) return multiply_few(a, p, tiles);
    multiply_many(a, p, tiles, (float*)(scratch + PRIVATE_PANEL_BYTES));
  }

  static constexpr Kernel kernel = {{ONCE_BYTES, 8}, {CHUNK_BYTES, 8, GROUP_PANELS, 3 * CHUNK_BYTES},
                                    PRIVATE_BYTES<Kind>, PARTS<Kind>, shape, pack_panel<Kind>, multiply};

 private:
  static void multiply_few(const Product& a, const Panels& p, TileRange tiles) {
    const size_t block_bytes = (size_t)p.units * Kind::UNIT_BYTES;
    const size_t share = (2 * block_bytes / (size_t)(p.count * PASSES) + 63) / 64 * 64;  // of a tile
    alignas(64) float c[SUMS];
    int32_t done = 0;  // tiles, of all panels
    const auto run = [&](const uint8_t* w, const uint8_t* x, int32_t tokens, const uint8_t* next) {
      const MicroDense micro = micro_dense_for<Kind>(tokens);
      const int32_t count = tiles.end - tiles.begin, panel = done / count, tile = done++ % count;
      for (int pass = 0; pass < PASSES; ++pass) {
        const size_t at = (size_t)tile * 2 * block_bytes + (size_t)(panel * PASSES + pass) * share;
        Ahead ahead = NOTHING_AHEAD;
        if (p.count > 1 && tiles.then) ahead = {tiles.then + at, (int32_t)(share / 64)};
        const int b = pass * MICRO_BLOCKS;
        micro(w + b * block_bytes, block_bytes, p.units, x, c + b * 16, false, next != nullptr, ahead);
      }
    };
    multiply_tile_by_tile<Kind>(a, p, tiles, c, run);
  }

  static void multiply_many(const Product& a, const Panels& p, TileRange range, float* sums) {
    const int32_t spans = (p.units + SPAN_UNITS - 1) / SPAN_UNITS;
    const size_t span_bytes = 2 * (size_t)((p.units + spans - 1) / spans) * Kind::UNIT_BYTES;  // of a tile
    const int32_t fit = (int32_t)(CHUNK_BYTES / span_bytes), most = fit < 1 ? 1 : fit;
    Pass pass = {a, p, range, sums, spans == 1};
    for (int32_t tile = range.begin; tile < range.end; tile += most) {
      pass.tiles.begin = tile, pass.tiles.end = tile + most < range.end ? tile + most : range.end;
      for (int32_t s = 0; s < spans; ++s) {
        const int32_t first = (int32_t)((int64_t)p.units * s / spans);
        pass.run(first, (int32_t)((int64_t)p.units * (s + 1) / spans));
      }
    }
  }

  // A few tiles times a group of panels.
  struct Pass {
    const Product& a;
    const Panels& p;
    TileRange tiles;
    float* sums;  // of one panel and tile, or [panels][tiles] of them
    bool whole;   // there is one span

    // Units first ... last - 1 of all panels and tiles.
    void run(int32_t first, int32_t last) const {
      const size_t block_bytes = (size_t)p.units * Kind::UNIT_BYTES;
      const uint8_t* data = (const uint8_t*)a.w.data + (size_t)first * Kind::UNIT_BYTES;
      float* c = sums;
      for (int32_t panel = tiles.first_panel; panel < tiles.end_panel; ++panel) {
        const int32_t row = p.begin(panel), tokens = p.begin(panel + 1) - row;
        const uint8_t* x = p.base + ((size_t)row * p.units + (size_t)first * tokens) * Kind::PANEL_BYTES;
        const MicroDense micro = micro_dense_for<Kind>(tokens);
        const bool streams = panel == tiles.first_panel;
        for (int32_t tile = tiles.begin; tile < tiles.end; ++tile, c += whole ? 0 : SUMS) {
          const uint8_t* w = data + (size_t)tile * 2 * block_bytes;
          if (last == p.units) fetch_outputs(a, tile, row, tokens);
          for (int b = 0; b < 2; b += MICRO_BLOCKS, w += block_bytes)
            micro(w, block_bytes, last - first, x, c + b * 16, first > 0, streams, NOTHING_AHEAD);
          if (last == p.units) finish_tile(a, tile, row, tokens, c);
        }
      }
    }

    // Asks for the lines that `finish_tile` writes, which are in no cache near.
    static void fetch_outputs(const Product& a, int32_t tile, int32_t row, int32_t tokens) {
      const float* y = a.y + (size_t)row * (size_t)a.stride + tile * (a.w.gated ? 16 : 32);
      for (int32_t t = 0; t < tokens; ++t, y += a.stride) {
        __builtin_prefetch(y, 1);
        if (!a.w.gated) __builtin_prefetch(y + 16, 1);
      }
    }
  };
};

}  // namespace VX_ISA
}  // namespace vx
