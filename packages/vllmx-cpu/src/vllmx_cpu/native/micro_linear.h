// Kernels of products that multiply by the micro kernels of micro.h: packed activations, tile by tile.
#pragma once
#include "micro.h"
#if defined(__AVX512VNNI__)
#include "micro_super.h"
#endif
#include "panels.h"

namespace vx {
namespace VX_ISA {

// Calls run(tile's weights, a panel's activations, tokens, the weights to fetch meanwhile or null) for
// all tiles and panels; it leaves [tokens][32] sums in c.
template <class Kind, class Run>
VX_INLINE void multiply_tile_by_tile(const Product& a, const Panels& p, TileRange tiles, const float* c, Run run) {
  const size_t tile_bytes = 2 * (size_t)p.units * Kind::UNIT_BYTES;
  const uint8_t* first = (const uint8_t*)a.w.data + (size_t)tiles.begin * tile_bytes;
  for (int32_t panel = 0; panel < p.count; ++panel) {
    const int32_t row = p.begin(panel), tokens = p.begin(panel + 1) - row;
    const uint8_t *x = p.base + (size_t)row * p.units * Kind::PANEL_BYTES, *w = first;
    for (int32_t tile = tiles.begin; tile < tiles.end; ++tile, w += tile_bytes) {
      const uint8_t* then = tile + 1 < tiles.end ? w + tile_bytes : tiles.then ? tiles.then : w;
      run(w, x, tokens, panel == 0 ? then : nullptr);
      finish_tile(a, tile, row, tokens, c);
    }
  }
}

// Up to MOST tokens at a time.
template <class Kind, int MOST = MICRO_TOKENS>
struct MicroKernel {
  static Panels shape(const Product& a) { return even_panels<Kind>(a, MOST); }
  static void multiply(const Product& a, const Panels& p, TileRange tiles, uint8_t*) {
    const size_t block_bytes = (size_t)p.units * Kind::UNIT_BYTES;
    alignas(64) float c[MOST * 32];
    const auto run = [&](const uint8_t* w, const uint8_t* x, int32_t tokens, const uint8_t* next) {
      const Micro micro = micro_for<Kind, MOST>(tokens);
      for (int b = 0; b < 2; b += MICRO_BLOCKS, w += block_bytes)
        micro(w, block_bytes, p.units, x, c + b * 16, next && b + MICRO_BLOCKS < 2 ? w + block_bytes : next);
    };
    multiply_tile_by_tile<Kind>(a, p, tiles, c, run);
  }
  static constexpr Kernel kernel = {{ONCE_BYTES, 8}, {CHUNK_BYTES, 8}, PRIVATE_BYTES<Kind>, PARTS<Kind>,
                                    shape, pack_panel<Kind>, multiply};
};

#if defined(__AVX512VNNI__)
// Many rows of a K type.
template <class Format>
struct SuperPairsKernel {
  typedef SuperPairs<Format> Pairs;
  typedef typename Pairs::Blocks Kind;
  static Panels shape(const Product& a) { return even_panels<Kind>(a, Pairs::TOKENS); }
  static void multiply(const Product& a, const Panels& p, TileRange tiles, uint8_t*) {
    const size_t block_bytes = (size_t)p.units * Kind::UNIT_BYTES;
    alignas(64) float c[Pairs::TOKENS * 32];
    const auto run = [&](const uint8_t* w, const uint8_t* x, int32_t tokens, const uint8_t* next) {
      Pairs::run(w, block_bytes, p.units, x, tokens, c, next);
    };
    multiply_tile_by_tile<Kind>(a, p, tiles, c, run);
  }
  static constexpr Kernel kernel = {{ONCE_BYTES, 8}, {CHUNK_BYTES, 8}, PRIVATE_BYTES<Kind>, PARTS<Kind>,
                                    shape, pack_panel<Kind>, multiply};
};
#endif

}  // namespace VX_ISA
}  // namespace vx
