// Products of bf16 weights on AMX tiles: the loops around tile_dense.h.
#pragma once
#include "panels.h"
#include "tile_dense.h"

namespace vx {
namespace VX_ISA {

// Where several panels pass by, units are cut so that a panel's part stays in the first-level cache,
// and tiles so that their sums stay in the second-level one.
enum { SLICE_UNITS = 16, SLICE_TILES = 16, SUM_FLOATS = TILE_TOKENS * 32 };

// The tiles begin ... end - 1 times one panel; c: their sums, [tiles][TILE_TOKENS][32].
static void multiply_dense_panel(const Product& a, const Panels& p, int32_t panel, int32_t begin,
                                 int32_t end, float* c) {
  const int32_t row = p.begin(panel), tokens = p.begin(panel + 1) - row;
  const int32_t pairs = (a.w.cols + 1) / 2, whole = pairs / 16, rest = pairs % 16;
  const size_t block_bytes = (size_t)pairs * 64;
  const uint8_t* x = p.base + (size_t)row * p.units * DenseTiles::PANEL_BYTES;
  const auto run = tokens > 16 ? multiply_dense<2> : multiply_dense<1>;
  const int32_t slice = p.count > 1 ? (int32_t)SLICE_UNITS : p.units;
  alignas(64) uint8_t padded[2][TILE_BYTES] = {};
  for (int32_t u = 0; u < p.units; u += slice) {
    const int32_t last = u + slice < whole ? u + slice : whole;
    for (int32_t tile = begin; tile < end; ++tile) {
      const uint8_t* data = (const uint8_t*)a.w.data + (size_t)tile * 2 * block_bytes;
      float* sums = c + (size_t)(tile - begin) * SUM_FLOATS;
      const uint8_t* part = x + (size_t)u * tokens * DenseTiles::PANEL_BYTES;
      if (u < last) {
        const uint8_t* blocks[2] = {data + (size_t)u * TILE_BYTES,
                                    data + block_bytes + (size_t)u * TILE_BYTES};
        const uint8_t* ahead[2] = {blocks[0] + FETCH_AHEAD, blocks[1] + FETCH_AHEAD};
        run(blocks, last - u, part, tokens, sums, u > 0, panel == 0 ? ahead : nullptr);
      }
      if (rest && u + slice >= p.units) {  // the columns behind the last whole unit
        for (int b = 0; b < 2; ++b)
          __builtin_memcpy(padded[b], data + b * block_bytes + (size_t)whole * TILE_BYTES, (size_t)rest * 64);
        const uint8_t* blocks[2] = {padded[0], padded[1]};
        run(blocks, 1, x + (size_t)whole * tokens * DenseTiles::PANEL_BYTES, tokens, sums, whole > 0, nullptr);
      }
    }
  }
}

struct DenseTileKernel {
  static Panels shape(const Product& a) { return panels_of<DenseTiles>(a, TILE_TOKENS); }
  static void multiply(const Product& a, const Panels& p, TileRange tiles, uint8_t* scratch) {
    float* c = (float*)(scratch + PRIVATE_PANEL_BYTES);
    TileShapes shapes;
    for (int32_t panel = 0; panel < p.count; ++panel) {
      const int32_t row = p.begin(panel), tokens = p.begin(panel + 1) - row;
      shapes.set(tokens, DenseTiles::STEPS);
      for (int32_t tile = tiles.begin; tile < tiles.end; tile += SLICE_TILES) {
        const int32_t last = tile + SLICE_TILES < tiles.end ? tile + SLICE_TILES : tiles.end;
        multiply_dense_panel(a, p, panel, tile, last, c);
        for (int32_t i = tile; i < last; ++i)
          finish_tile(a, i, row, tokens, c + (size_t)(i - tile) * SUM_FLOATS);
      }
    }
  }
  // Activations come from the third-level cache once a chunk, while the tiles are fast: larger chunks.
  static constexpr Kernel kernel = {{CHUNK_BYTES, 8}, {4 * CHUNK_BYTES, 4}, PRIVATE_PANEL_BYTES, 1,
                                    shape, pack_panel<DenseTiles>, multiply};
};

}  // namespace VX_ISA
}  // namespace vx
