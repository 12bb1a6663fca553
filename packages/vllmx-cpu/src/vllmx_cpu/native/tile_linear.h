// `linear` of quantised weights on AMX tiles: the loops around tile_flat.h, tile_super.h and tile_float8.h.
#pragma once
#include "linear_output.h"
#include "tile_flat.h"
#include "tile_float8.h"
#include "tile_super.h"
#include "weight_chunks.h"

namespace vx {
namespace VX_ISA {

// --- units with one sum each ------------------------------------------------------------------------
// What passes by unpacked weights: panels that stay in the second-level cache, with their accumulators.
enum { PASS_BYTES = 1 << 20, PASS_TOKENS = 512, FROM_MANY = 4 };

// One block of 16 rows times panels first ... last - 1 into c, [tokens][32].
template <class Kind, int TOKENS, Passing PASSING>
static void multiply_flat(const uint8_t* block, const typename Kind::Panels& p, int32_t first, int32_t last,
                          float* c, uint8_t* room, Fetch fetch) {
  for (int32_t u = 0; u < p.units; u += Kind::SPAN) {
    const int32_t count = p.units - u < Kind::SPAN ? p.units - u : (int32_t)Kind::SPAN;
    const uint8_t* tiles = Kind::template unpack<PASSING>(block, u, count, room);
    float* sums = c;
    for (int32_t panel = first; panel < last; ++panel, sums += TOKENS * 32) {
      if (PASSING == MANY) fetch.next();
      Kind::template multiply<TOKENS, PASSING>(tiles, block, u, count, p.units, p.at(panel, u), sums, &fetch);
    }
  }
}

template <class Kind>
static void run_flat_tiles(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  const typename Kind::Panels p = Kind::Panels::pack(a, step, rows, ctx);
  const int32_t block_bytes = p.units * (int32_t)Kind::UNIT_BYTES;
  const int32_t fit = (int32_t)(PASS_BYTES / p.panel_bytes()), most = PASS_TOKENS / 16;
  const int32_t pass = fit < 1 ? 1 : fit < most ? fit : most, passing = p.count < pass ? p.count : pass;
  const bool many = p.size == 16 && passing >= FROM_MANY;
  const auto run = many           ? multiply_flat<Kind, 16, MANY>
                   : p.size == 16 ? multiply_flat<Kind, 16, FEW>
                   : p.size == 12 ? multiply_flat<Kind, 12, FEW>
                   : p.size == 8  ? multiply_flat<Kind, 8, FEW>
                                  : multiply_flat<Kind, 4, FEW>;
  // The next block is fetched while this one is used: lines for each panel of a span, or for each unit.
  const int32_t uses = passing * (many ? (p.units + Kind::SPAN - 1) / Kind::SPAN : p.units);
  const int32_t lines = (block_bytes / 64 + uses) / uses;
  float* c = (float*)(ctx->scratch + Kind::Panels::PRIVATE_BYTES);
  uint8_t* room = (uint8_t*)(c + PASS_TOKENS * 32);
  TileShapes shapes;
  shapes.set(p.size, p.size, Kind::STEPS);
  for_chunks(&a->w, 2 * (size_t)block_bytes, {CHUNK_BYTES, 8}, ctx, [&](int32_t begin, int32_t end) {
    const uint8_t* data = (const uint8_t*)a->w.data;
    for (int32_t first = 0; first < p.count; first += pass) {
      const int32_t last = first + pass < p.count ? first + pass : p.count, row = p.begin(first);
      for (int32_t tile = begin; tile < end; ++tile) {
        for (int b = 0; b < 2; ++b) {
          const uint8_t *block = data + (size_t)(2 * tile + b) * block_bytes, *next = block + block_bytes;
          const bool stays = first > 0 || (tile == end - 1 && b == 1);
          run(block, p, first, last, c + b * 16, room, {next, stays ? next : next + block_bytes, lines});
        }
        finish_tile(a, tile, row, p.begin(last) - row, c);
      }
    }
  });
}

// --- units with several sums, whose weights are unpacked one at a time ----------------------------
// The tokens that pass by unpacked weights; their accumulators stay in the second-level cache.
enum { PASS_PANELS = 16, PASS_FLOATS = PASS_PANELS * TILE_TOKENS * 32 };

// One block of 16 rows, half `b` of a tile, times panels first ... last - 1.
template <class Kind>
static void multiply_block(const uint8_t* block, const Panels& p, int32_t first, int32_t last, float* c,
                           uint8_t* room, TileShapes* shapes, bool ahead) {
  alignas(64) int32_t sums[TILE_TOKENS * 32];
  for (int32_t u = 0; u < p.units; ++u) {
    if (ahead) {
      const uint8_t* next = block + (size_t)u * Kind::UNIT_BYTES + FETCH_AHEAD;
      for (int32_t i = 0; i < (int32_t)Kind::UNIT_BYTES; i += 64) prefetch(next + i);
    }
    const uint8_t* tiles = Kind::unpack(block, u, room);
    for (int32_t panel = first; panel < last; ++panel) {
      const int32_t row = p.begin(panel), tokens = p.begin(panel + 1) - row;
      const uint8_t* x = p.base + ((size_t)row * p.units + (size_t)tokens * u) * Kind::PANEL_BYTES;
      shapes->set(tokens, Kind::STEPS);
      Kind::multiply_unit(tiles, block, u, p.units, x, tokens,
                          c + (size_t)(panel - first) * TILE_TOKENS * 32, sums);
    }
  }
}

template <class Kind>
static void run_tiles(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  const Panels p = pack<Kind>(a, step, rows, TILE_TOKENS, ctx);
  const size_t block_bytes = (size_t)p.units * Kind::UNIT_BYTES;
  float* c = (float*)(ctx->scratch + PRIVATE_PANEL_BYTES);
  uint8_t* room = (uint8_t*)(c + PASS_FLOATS);
  TileShapes shapes;
  for_chunks(&a->w, 2 * block_bytes, {CHUNK_BYTES, 8}, ctx, [&](int32_t begin, int32_t end) {
    for (int32_t tile = begin; tile < end; ++tile)
      for (int32_t first = 0; first < p.count; first += PASS_PANELS) {
        const int32_t last = first + PASS_PANELS < p.count ? first + PASS_PANELS : p.count;
        const int32_t row = p.begin(first), passing = p.begin(last) - row;
        for (int32_t i = 0; i < passing * 32; i += 16) store(c + i, zero());
        for (int b = 0; b < 2; ++b) {
          const uint8_t* block = (const uint8_t*)a->w.data + (size_t)(2 * tile + b) * block_bytes;
          multiply_block<Kind>(block, p, first, last, c + b * 16, room, &shapes, first == 0);
        }
        finish_tile(a, tile, row, passing, c);
      }
  });
}

// On tiles where enough rows make that the faster way; true if it was.
template <class Format>
static bool run_on_tiles(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  if constexpr (Format::FAMILY == layout::FLOAT8) {
    run_tiles<Float8Tiles>(a, step, rows, ctx);
    return true;
  } else if constexpr (Format::FAMILY == layout::SUPER) {
    if (rows < SuperTiles<Format>::FROM_TOKENS) return false;
    run_tiles<SuperTiles<Format>>(a, step, rows, ctx);
    return true;
  } else {
    if (rows < FlatTiles<Format>::FROM_TOKENS) return false;
    run_flat_tiles<FlatTiles<Format>>(a, step, rows, ctx);
    return true;
  }
}

}  // namespace VX_ISA
}  // namespace vx
