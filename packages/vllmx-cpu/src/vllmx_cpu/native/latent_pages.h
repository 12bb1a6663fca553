// Rows of latents on their way into and out of pages. A slice of a chunk's rows becomes an operand, keys
// with positions as lanes or values with features as lanes, which stays in the first-level cache while all
// rows of queries of a unit are multiplied with it.
#pragma once
#include "attention_cut.h"
#include "latent_attention.h"

namespace vx {
namespace VX_ISA {

typedef uint32_t FourCells __attribute__((vector_size(16)));
typedef uint16_t EightWords __attribute__((vector_size(16)));

// What the pages hold; Pages: what is computed with.
struct Bf16Latents {
  typedef uint16_t Item;
  typedef Bf16Pages Pages;
  VX_INLINE void write(Item* row, int i, F32x16 v, int n) {
    uint16_t words[16];
    store_bf16(words, v);
    __builtin_memcpy(row + i, words, n * sizeof *words);
  }
  VX_INLINE void read(const Item* row, int size, uint32_t* cells) { __builtin_memcpy(cells, row, size * sizeof *row); }
};
struct F16Latents {
  typedef uint16_t Item;
  typedef F32Pages Pages;
  VX_INLINE void write(Item* row, int i, F32x16 v, int n) {
    uint16_t halves[16];
    store_f16(halves, v);
    __builtin_memcpy(row + i, halves, n * sizeof *halves);
  }
  VX_INLINE void read(const Item* row, int size, float* cells) {
    int i = 0;
    for (; i + 16 <= size; i += 16) store(cells + i, load_f16(row + i));
    uint16_t rest[16] = {};
    __builtin_memcpy(rest, row + i, (size - i) * sizeof *rest);
    if (i < size) store_n(cells + i, load_f16(rest), size - i);
  }
};
struct F32Latents {
  typedef float Item;
  typedef F32Pages Pages;
  VX_INLINE void write(Item* row, int i, F32x16 v, int n) { store_n(row + i, v, n); }
  VX_INLINE void read(const Item* row, int size, float* cells) { __builtin_memcpy(cells, row, size * sizeof *row); }
};

// Four rows of four cells, `stride` apart, into four rows of a chunk's positions, turned over.
VX_INLINE void turn_cells(const uint32_t* in, int stride, uint32_t* out) {
  FourCells a, b, c, d;
  __builtin_memcpy(&a, in, 16), __builtin_memcpy(&b, in + stride, 16);
  __builtin_memcpy(&c, in + 2 * stride, 16), __builtin_memcpy(&d, in + 3 * stride, 16);
  const FourCells ab = VX_LANES(FourCells, a, b, 0, 4, 1, 5), ab2 = VX_LANES(FourCells, a, b, 2, 6, 3, 7);
  const FourCells cd = VX_LANES(FourCells, c, d, 0, 4, 1, 5), cd2 = VX_LANES(FourCells, c, d, 2, 6, 3, 7);
  const FourCells rows[4] = {VX_LANES(FourCells, ab, cd, 0, 1, 4, 5), VX_LANES(FourCells, ab, cd, 2, 3, 6, 7),
                             VX_LANES(FourCells, ab2, cd2, 0, 1, 4, 5), VX_LANES(FourCells, ab2, cd2, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) __builtin_memcpy(out + i * kChunk, &rows[i], 16);
}

// Features of two neighbouring positions side by side, eight at a time.
VX_INLINE void pair_words(const uint16_t* first, const uint16_t* second, uint32_t* out) {
  EightWords a, b;
  __builtin_memcpy(&a, first, 16), __builtin_memcpy(&b, second, 16);
  const EightWords low = VX_LANES(EightWords, a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  const EightWords high = VX_LANES(EightWords, a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  __builtin_memcpy(out, &low, 16), __builtin_memcpy(out + 4, &high, 16);
}
#undef VX_LANES

// The rows of a chunk of positions, and slices of them as operands.
template <class Latents>
class LatentChunk {
  typedef typename Latents::Pages Pages;
  typedef typename Latents::Item Item;
  typedef typename Pages::Cell Cell;

 public:
  // `a` has the rank as its head size, and the pages as those of keys. The room is for kChunk rows.
  LatentChunk(const VxAttention& a, const VxStep& step, Cell* room)
      : a_(a), step_(step), row_size_(a.head_size + a.rotary_dim), row_cells_(padded(row_size_) / Pages::per_cell),
        room_(room) {}

  // The positions from `start` on that the tile sees; those behind them are 0. Where they begin a row
  // that lies further behind is on its way into the cache while slices are made.
  void find(const Tile& tile, int start) {
    groups_ = minimum(ceil_div(tile.keys.hi - start, kGroup), (int)kChunkGroups);
    for (int g = 0; g < groups_; ++g) {
      rows_[g] = find_rows(tile, start + g * kGroup, room_ + (size_t)g * kGroup * row_cells_);
      const int later = start + kChunk + g * kGroup;
      later_[g] = later < tile.keys.hi && !scattered() ? (const uint8_t*)items(tile, later) : nullptr;
    }
  }

  // The keys' cells first ... first + cells - 1, a multiple of four: [cells][kChunk positions].
  void keys(int first, int cells, Cell* out) const {
    const int stride = row_cells_;
    for (int g = 0; g < kChunkGroups; ++g) {
      uint32_t* to = (uint32_t*)out + g * kGroup;
      if (g >= groups_) {
        for (int s = 0; s < cells; ++s) store_u32(to + s * kChunk, splat_u32(0));
        continue;
      }
      fetch(g, first, cells);
      for (int i = 0; i < kGroup; i += 4) {
        const uint32_t* in = (const uint32_t*)rows_[g] + (size_t)i * stride + first;
        for (int s = 0; s < cells; s += 4) turn_cells(in + s, stride, to + s * kChunk + i);
      }
    }
  }

  // The values' features first ... first + 15, of all positions: [kChunk / per_cell][stride].
  void values(int first, int stride, Cell* out) const {
    for (int g = 0; g < groups_; ++g) {
      for (int i = 0; i < kGroup; i += Pages::per_cell, out += stride) {
        const Cell* row = rows_[g] + (size_t)i * row_cells_;
        if constexpr (Pages::per_cell == 1) {
          store(out, load(row + first));
        } else {
          const uint16_t *one = (const uint16_t*)row + first, *other = (const uint16_t*)(row + row_cells_) + first;
          pair_words(one, other, out), pair_words(one + 8, other + 8, out + 8);
        }
      }
    }
  }

 private:
  // A group of positions is not in one page.
  bool scattered() const { return a_.block_size % kGroup != 0; }

  const Item* items(const Tile& tile, int position) const {
    const int32_t* table = step_.block_tables + (size_t)tile.row * step_.block_stride;
    const size_t first = (size_t)table[position / a_.block_size] * a_.block_size + position % a_.block_size;
    return (const Item*)a_.k_pages + first * row_size_;
  }

  // The rows of a group where they lie, or a copy where some of them are not seen, or are no whole vectors.
  const Cell* find_rows(const Tile& tile, int position, Cell* room) const {
    const Item* from = items(tile, position);
    const int seen = minimum(tile.keys.hi - position, kGroup), whole = row_cells_ * Pages::per_cell;
    const bool as_it_lies = !scattered() && sizeof(Item) * Pages::per_cell == sizeof(Cell);
    if (as_it_lies && seen == kGroup && whole == row_size_) return (const Cell*)from;
    for (int i = 0; i < kGroup; ++i) {
      Cell* row = room + i * row_cells_;
      const int size = i < seen ? row_size_ : 0;  // the rest of the row is 0
      if (size > 0) Latents::read(scattered() ? items(tile, position + i) : from + (size_t)i * row_size_, size, row);
      const size_t bytes = sizeof(Cell) / Pages::per_cell;
      __builtin_memset((uint8_t*)row + size * bytes, 0, (whole - size) * bytes);
    }
    return room;
  }

  // These cells of the group that comes a chunk later.
  void fetch(int g, int first, int cells) const {
    if (!later_[g]) return;
    const size_t row_bytes = row_size_ * sizeof(Item), cell_bytes = sizeof(Item) * Pages::per_cell;
    for (int i = 0; i < kGroup; ++i)
      for (int s = 0; s < cells; s += 64 / (int)cell_bytes)
        prefetch_pages(later_[g] + i * row_bytes + (first + s) * cell_bytes);
  }

  const VxAttention& a_;
  const VxStep& step_;
  int row_size_, row_cells_, groups_ = 0;
  Cell* room_;
  const Cell* rows_[kChunkGroups] = {};
  const uint8_t* later_[kChunkGroups] = {};
};

}  // namespace VX_ISA
}  // namespace vx
