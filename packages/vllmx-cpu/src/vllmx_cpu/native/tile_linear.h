// Products of quantised weights on AMX tiles: the loops around tile_flat.h, tile_super.h and tile_float8.h.
#pragma once
#include "tile_flat.h"
#include "tile_float8.h"
#include "tile_super.h"

namespace vx {
namespace VX_ISA {

// --- units with one sum each ------------------------------------------------------------------------
// What passes by unpacked weights: panels that stay in the second-level cache, with their accumulators.
enum { PASS_BYTES = 1 << 20, PASS_TOKENS = 512, FROM_MANY = 4 };

template <class Panels>
static int32_t passing_panels(const Panels& p) {
  const int32_t fit = (int32_t)(PASS_BYTES / p.panel_bytes()), most = PASS_TOKENS / 16;
  return fit < 1 ? 1 : fit < most ? fit : most;
}

// The last sums of a block are added beside the first products of the next, whatever output tile that is of.
template <class Kind, int TOKENS, Passing PASSING>
struct FlatRun {
  typedef typename Kind::Panels Panels;
  typedef typename Kind::UnitProduct UnitProduct;
  const Product& a;
  Panels p;
  uint8_t* room;            // for a span of units as tiles
  float *c, *other;         // [PASS_TOKENS][32] accumulators of an output tile, and of the next one
  alignas(64) int32_t sums[4 * 16 * TOKENS];
  UnitProduct before;
  int32_t tile = 0, row = 0, rows = 0;  // the output tile that `other` belongs to; rows is 0 where it is stored

  FlatRun(const Product& product, const Panels& panels, uint8_t* scratch)
      : a(product), p(panels), room(scratch + 2 * PASS_TOKENS * 32 * 4), c((float*)scratch),
        other(c + PASS_TOKENS * 32), before{nullptr, nullptr, nullptr, 0, 0, c} {}

  // Half `b` of a tile times panels first ... last - 1.
  void multiply(const uint8_t* block, int32_t first, int32_t last, int b, Fetch fetch) {
    for (int32_t u = 0; u < p.units; u += Kind::SPAN) {
      const int32_t count = p.units - u < Kind::SPAN ? p.units - u : (int32_t)Kind::SPAN;
      const uint8_t* tiles = Kind::template unpack<PASSING>(block, u, count, room);
      float* at = c + b * 16;
      for (int32_t panel = first; panel < last; ++panel, at += TOKENS * 32) {
        if (PASSING == MANY) fetch.next();
        const UnitProduct now = {tiles, block, p.at(panel, u), u, count, at};
        Kind::template multiply<TOKENS, PASSING>(now, &before, p.units, sums, &fetch);
        finish_rows();
      }
    }
  }
  // The output tile whose products have been made.
  void end_tile(int32_t its_tile, int32_t its_row, int32_t its_rows) {
    float* done = c;
    c = other, other = done;
    tile = its_tile, row = its_row, rows = its_rows;
  }
  void finish() {
    Fetch none = {nullptr, nullptr, 0};
    Kind::template multiply<TOKENS, PASSING>({nullptr, nullptr, nullptr, 1, 0, before.c}, &before, p.units, sums, &none);
    finish_rows();
  }

 private:
  void finish_rows() {
    if (rows > 0) finish_tile(a, tile, row, rows, other);
    rows = 0;
  }
};

template <class Kind, int TOKENS, Passing PASSING>
static void multiply_flat(const Product& a, const typename Kind::Panels& p, TileRange tiles, uint8_t* scratch) {
  const int32_t block_bytes = p.units * (int32_t)Kind::UNIT_BYTES;
  const int32_t pass = passing_panels(p), passing = p.count < pass ? p.count : pass;
  // The next block is fetched while this one is used: lines for each panel of a span, or for each unit.
  const int32_t uses = passing * (PASSING == MANY ? (p.units + Kind::SPAN - 1) / Kind::SPAN : p.units);
  const int32_t lines = (block_bytes / 64 + uses) / uses;
  TileShapes shapes;
  shapes.set(TOKENS, TOKENS, Kind::STEPS);
  FlatRun<Kind, TOKENS, PASSING> run(a, p, scratch + Kind::Panels::PRIVATE_BYTES);
  const uint8_t* data = (const uint8_t*)a.w.data;
  for (int32_t first = 0; first < p.count; first += pass) {
    const int32_t last = first + pass < p.count ? first + pass : p.count, row = p.begin(first);
    for (int32_t tile = tiles.begin; tile < tiles.end; ++tile) {
      for (int b = 0; b < 2; ++b) {
        const uint8_t* block = data + (size_t)(2 * tile + b) * block_bytes;
        const uint8_t* next = b == 1 && tile + 1 == tiles.end ? tiles.then : block + block_bytes;
        const bool stays = first > 0 || !next;
        run.multiply(block, first, last, b, {next, stays ? next : next + block_bytes, lines});
      }
      run.end_tile(tile, row, p.begin(last) - row);
    }
  }
  run.finish();
}

template <class Kind>
static void multiply_flat_tiles(const Product& a, const Panels& panels, TileRange tiles, uint8_t* scratch) {
  const typename Kind::Panels p(panels);
  enum { LEAST = Kind::FROM_TOKENS > 8 ? 12 : 8 };  // the least size of panels of FROM_TOKENS rows or more
  const bool many = p.size == 16 && p.count >= FROM_MANY && passing_panels(p) >= FROM_MANY;
  const auto run = many             ? multiply_flat<Kind, 16, MANY>
                   : p.size == 16   ? multiply_flat<Kind, 16, FEW>
                   : p.size == 12   ? multiply_flat<Kind, 12, FEW>
                                    : multiply_flat<Kind, LEAST, FEW>;
  run(a, p, tiles, scratch);
}

// --- units of 256 columns --------------------------------------------------------------------------
// A product's sums are added beside the next product, whatever block or output tile that is of.
template <class Tiles>
struct SuperRun {
  typedef typename Tiles::Panels Panels;
  typedef typename Tiles::UnitProduct UnitProduct;
  const Product& a;
  Panels p;
  uint8_t* room;  // for a unit as tiles
  int32_t* sums;
  UnitProduct before = {};
  int32_t tile = 0, row = 0, rows = 0;  // what `before` is the last product of; rows is 0 where there is more

  // What waits for the next product.
  void finish(float* c) {
    if (before.x[0]) Tiles::finish(before, p.size, sums);
    before = {};
    finish_rows(c);
  }
  void finish_rows(float* c) {
    if (rows == 0) return;
    finish_tile(a, tile, row, rows, c);
    clear(c);
    rows = 0;
  }
  void clear(float* c) {
    for (int32_t i = 0; i < PASS_TOKENS * 32 && i < p.count * p.size * 32; i += 16) store(c + i, zero());
  }

  // The unit at `unit`, whose tiles are ready, times panels first ... last - 1 into half `b` of c; `next` is
  // the unit after it.
  void multiply(const uint8_t* unit, int32_t u, int32_t first, int32_t last, float* all, int b,
                const uint8_t* next, Fetch* fetch) {
    float* c = all + b * 16;
    for (int32_t panel = first; panel < last; panel += 2, c += 2 * p.size * 32) {
      const bool pair = panel + 1 < last;
      const UnitProduct now = {unit, {p.at(panel, u), pair ? p.at(panel + 1, u) : nullptr}, c};
      const auto run = pair ? Tiles::template run<true, Fetch> : Tiles::template run<false, Fetch>;
      run(now, before, p.size, panel + 2 < last ? nullptr : next, room, sums, fetch);
      before = now;
      finish_rows(all);
    }
  }
};

template <class Tiles>
static void multiply_super_tiles(const Product& a, const Panels& panels, TileRange tiles, uint8_t* scratch) {
  typedef typename Tiles::Panels TilesPanels;
  const TilesPanels p(panels);
  const int32_t block_bytes = p.units * (int32_t)Tiles::UNIT_BYTES, most = PASS_TOKENS / 16;
  const int32_t pass = p.count < most ? p.count : most, pairs = (pass + 1) / 2;
  const int32_t uses = p.units * pairs * Tiles::PARTS, lines = (block_bytes / 64 + uses) / uses;
  float* c = (float*)(scratch + TilesPanels::PRIVATE_BYTES);
  uint8_t* room = (uint8_t*)(c + PASS_TOKENS * 32);
  alignas(64) int32_t sums[Tiles::SUMS];
  TileShapes shapes;
  shapes.set(p.size, p.size, Tiles::STEPS);
  SuperRun<Tiles> run = {a, p, room, sums};
  run.clear(c);
  Tiles::clear(room);
  const uint8_t *data = (const uint8_t*)a.w.data, *end = data + (size_t)2 * tiles.end * block_bytes;
  for (int part = 0; part < Tiles::PARTS; ++part)
    Tiles::unpack(data + (size_t)2 * tiles.begin * block_bytes, part, room);
  for (int32_t tile = tiles.begin; tile < tiles.end; ++tile)
    for (int32_t first = 0; first < p.count; first += pass) {
      const int32_t last = first + pass < p.count ? first + pass : p.count;
      const uint8_t* unit = data + (size_t)2 * tile * block_bytes;
      const uint8_t* again = last < p.count ? unit : nullptr;
      for (int b = 0; b < 2; ++b) {
        const uint8_t* ahead = unit + block_bytes == end ? tiles.then : unit + block_bytes;
        const bool stays = first > 0 || !ahead;
        Fetch fetch = {ahead, stays ? ahead : ahead + block_bytes, lines};
        for (int32_t u = 0; u < p.units; ++u, unit += Tiles::UNIT_BYTES) {
          const uint8_t* next = unit + Tiles::UNIT_BYTES;
          if (b == 1 && u + 1 == p.units && again) next = again;
          run.multiply(unit, u, first, last, c, b, next == end ? nullptr : next, &fetch);
        }
      }
      run.tile = tile, run.row = p.begin(first), run.rows = p.begin(last) - run.row;
    }
  run.finish(c);
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
static void multiply_unit_by_unit(const Product& a, const Panels& p, TileRange tiles, uint8_t* scratch) {
  const size_t block_bytes = (size_t)p.units * Kind::UNIT_BYTES;
  float* c = (float*)(scratch + PRIVATE_PANEL_BYTES);
  uint8_t* room = (uint8_t*)(c + PASS_FLOATS);
  TileShapes shapes;
  for (int32_t tile = tiles.begin; tile < tiles.end; ++tile)
    for (int32_t first = 0; first < p.count; first += PASS_PANELS) {
      const int32_t last = first + PASS_PANELS < p.count ? first + PASS_PANELS : p.count;
      const int32_t row = p.begin(first), passing = p.begin(last) - row;
      for (int32_t i = 0; i < passing * 32; i += 16) store(c + i, zero());
      for (int b = 0; b < 2; ++b) {
        const uint8_t* block = (const uint8_t*)a.w.data + (size_t)(2 * tile + b) * block_bytes;
        multiply_block<Kind>(block, p, first, last, c + b * 16, room, &shapes, first == 0);
      }
      finish_tile(a, tile, row, passing, c);
    }
}

// From so many rows on tiles are the faster way.
template <class Format>
static constexpr int32_t tiles_from() {
  if constexpr (Format::FAMILY == layout::FLOAT8)
    return 1;
  else if constexpr (Format::FAMILY == layout::SUPER)
    return SuperTiles<Format>::FROM_TOKENS;
  else
    return FlatTiles<Format>::FROM_TOKENS;
}
template <class Format>
static constexpr int32_t TILES_FROM = tiles_from<Format>();

template <class Panels>
static constexpr Kernel tile_kernel(decltype(Kernel::multiply) multiply) {
  return {{CHUNK_BYTES, 8}, {CHUNK_BYTES, 8}, Panels::PRIVATE_BYTES, Panels::PARTS, Panels::shape, Panels::pack, multiply};
}
template <class Format, layout::Family FAMILY = Format::FAMILY>
struct TileKernel {
  typedef FlatTiles<Format> Kind;
  static constexpr Kernel kernel = tile_kernel<typename Kind::Panels>(multiply_flat_tiles<Kind>);
};
template <class Format>
struct TileKernel<Format, layout::SUPER> {
  typedef SuperTiles<Format> Kind;
  static constexpr Kernel kernel = tile_kernel<typename Kind::Panels>(multiply_super_tiles<Kind>);
};
template <class Format>
struct TileKernel<Format, layout::FLOAT8> {
  static Panels shape(const Product& a) { return panels_of<Float8Tiles>(a, TILE_TOKENS); }
  static constexpr Kernel kernel = {{CHUNK_BYTES, 8}, {CHUNK_BYTES, 8}, PRIVATE_BYTES<Float8Tiles>, PARTS<Float8Tiles>,
                                    shape, pack_panel<Float8Tiles>, multiply_unit_by_unit<Float8Tiles>};
};

}  // namespace VX_ISA
}  // namespace vx
