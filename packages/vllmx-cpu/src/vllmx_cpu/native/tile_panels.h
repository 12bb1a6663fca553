// Activations for tiles: panels of up to 16 tokens whose quads lie as a tile is loaded, in whole cache
// lines, and beside them the factors of each token.
#pragma once
#include "panels.h"

namespace vx {
namespace VX_ISA {

// A unit of a panel of n tokens: for each the first FACTORS bytes of Blocks::pack_unit, the factors of its
// sum, room for 16 | [n][columns] quads | [n][EXTRA] bytes that follow the quads there. A panel has 4, 8, 12
// or 16 tokens; those beyond the last are zero.
template <class Blocks, int FACTORS_ = 8, int EXTRA = 0>
struct TilePanels : Panels {
  enum { FACTORS = FACTORS_, QUADS = 16 * FACTORS };
  explicit TilePanels(const Panels& p) : Panels(p) {}

  static constexpr size_t unit_bytes(int32_t tokens) { return QUADS + (size_t)tokens * (Blocks::UNIT_COLS + EXTRA); }
  size_t panel_bytes() const { return (size_t)units * unit_bytes(size); }
  const uint8_t* at(int32_t panel, int32_t u) const {
    return base + (size_t)panel * panel_bytes() + (size_t)u * unit_bytes(size);
  }

  enum { PRIVATE_BYTES = 16 << 10, PARTS = 4 };  // of Kernel

  static Panels shape(const Product& a) {
    Panels p = {};
    p.rows = a.rows;
    p.units = (a.w.cols + Blocks::UNIT_COLS - 1) / Blocks::UNIT_COLS;
    const int32_t least = (a.rows + 15) / 16;
    p.size = ((a.rows + least - 1) / least + 3) / 4 * 4;
    p.count = (a.rows + p.size - 1) / p.size;
    p.bytes = (size_t)p.count * TilePanels(p).panel_bytes();
    return p;
  }

  // A part of a panel's units: threads that share a panel write to lines of their own.
  static void pack(const Product& a, const Panels& panels, int32_t panel, int32_t part, int32_t parts) {
    const TilePanels p(panels);
    const int32_t rows = p.rows, size = p.size;
    const int32_t first = p.units * part / parts, last = p.units * (part + 1) / parts;
    const size_t stride = unit_bytes(size);
    uint8_t* out = p.base + (size_t)panel * p.panel_bytes();
    for (int32_t t = 0; t < size; ++t) {
      const int32_t row = panel * size + t;
      const size_t factors = (size_t)t * FACTORS, quads = QUADS + (size_t)t * Blocks::UNIT_COLS;
      const size_t extra = QUADS + (size_t)size * Blocks::UNIT_COLS + (size_t)t * EXTRA;
      const auto write = [&](const uint8_t* unit, int32_t u) {
        uint8_t* to = out + (size_t)u * stride;
        __builtin_memcpy(to + factors, unit, FACTORS);
        __builtin_memcpy(to + quads, unit + Blocks::QUADS, Blocks::UNIT_COLS);
        __builtin_memcpy(to + extra, unit + Blocks::QUADS + Blocks::UNIT_COLS, EXTRA);
      };
      alignas(64) uint8_t unit[Blocks::PANEL_BYTES] = {};
      if (row >= rows) {
        for (int32_t u = first; u < last; ++u) write(unit, u);
        continue;
      }
            for_units<Blocks::UNIT_COLS>(&a.w, a.row(row), first, last, [&](const float* values, int32_t u) {
        Blocks::pack_unit(values, unit);
        write(unit, u);
      });
    }
  }
};

}  // namespace VX_ISA
}  // namespace vx
