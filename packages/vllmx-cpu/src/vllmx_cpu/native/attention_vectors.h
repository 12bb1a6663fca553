// Partitions of a unit by vectors, in chunks of 64 positions.
#pragma once
#include "attention_codes.h"
#include "attention_cut.h"
#include "attention_heads.h"

namespace vx {
namespace VX_ISA {

// Stored: the pages; Pages: what is computed with.
template <class Stored>
class VectorPartition {
  typedef typename Stored::Arithmetic Pages;
  typedef typename Pages::Operand Operand;
  typedef typename Pages::Cell Cell;

 public:
  VectorPartition(const PagedAttention& a, const VxStep& step, float* room)
      : a_(a), step_(step), pages_(a), width_(padded(a.head_size)), q_stride_(width_ / Pages::per_cell) {
    softmax_ = softmax_parameters(a);
    acc_ = room;
    q_ = (Operand*)(acc_ + kTileRows * width_);
    p_ = q_ + kTileRows * q_stride_;
    lane_sums_ = (float*)(p_ + kTileRows * p_stride);
    widened_ = (Cell*)(lane_sums_ + kTileRows * 16);
  }

  void begin(const Unit& unit) { unit_ = &unit, expected_ = false; }

  // The tile and the kv head that come after this unit (null: unknown).
  void expect(const Tile* tile, int kv_head) {
    expected_ = tile != nullptr;
    if (expected_) find_groups(*tile, kv_head, first_group(*tile) * kGroup / kChunk * kChunk, &next_);
  }

  // Query r of the unit, Dp floats.
  void set_query(int r, const float* q) {
    for (int i = 0; i < width_; i += 16) Pages::store_operand(q_ + r * q_stride_, i, load(q + i));
  }

  void run(int partition) {
    for (int r = 0; r < unit_->rows; ++r) maxima_[r] = kFloor;
    __builtin_memset(lane_sums_, 0, sizeof(float) * 16 * unit_->rows);
    __builtin_memset(acc_, 0, sizeof(float) * unit_->rows * width_);
    int start = maximum(partition * kPartition, unit_->tile.keys.lo / kChunk * kChunk);
    int end = minimum((partition + 1) * kPartition, unit_->tile.keys.hi);
    for (int chunk = start; chunk < end; chunk += kChunk) {
      Groups now, later;
      find_groups(unit_->tile, unit_->heads.kv_head, chunk, &now);
      if (expected_ && chunk + kChunk >= unit_->tile.keys.hi) {
        later = next_;
      } else {
        find_groups(unit_->tile, unit_->heads.kv_head, chunk + kChunk, &later);
      }
      if constexpr (Stored::scaled) {
        widened_chunk(chunk, now, later);
      } else {
        for (int r = 0; r < unit_->rows; r += kRowBlock) probabilities(r, chunk, now.k, later.k, {});
        for (int r = 0; r < unit_->rows; r += kRowBlock) values(r, chunk, now.v, later.v);
      }
    }
  }

  // Of the partition that ran last.
  RowState state(int r) const { return {maxima_[r], reduce_add(load(lane_sums_ + 16 * r))}; }
  const float* sums(int r) const { return acc_ + r * width_; }

 private:
  static constexpr int p_stride = kChunk / Pages::per_cell;
  typedef typename Stored::Cell StoredCell;
  static constexpr int kKeyCells = Stored::scaled ? 2 * Stored::keys_per_cell : 1;
  static constexpr int kValueCells = Stored::scaled ? 2 * Stored::values_per_cell : 1;

  struct Groups {
    const StoredCell *k[kChunkGroups], *v[kChunkGroups];
  };

  // The groups of a chunk; those outside of what the tile sees repeat the nearest one.
  void find_groups(const Tile& tile, int kv_head, int chunk_start, Groups* groups) const {
    int lo = first_group(tile), hi = last_group(tile);
    const int32_t* table = step_.block_tables + (size_t)tile.row * step_.block_stride;
    for (int g = 0; g < kChunkGroups; ++g) {
      int group = minimum(maximum(chunk_start / kGroup + g, lo), hi);
      int block = table[group / pages_.groups_per_block], inside = group % pages_.groups_per_block;
      groups->k[g] = pages_.k_group(block, kv_head, inside);
      groups->v[g] = pages_.v_group(block, kv_head, inside);
    }
  }

  // A chunk of codes: the keys and then the values lie in `widened_`.
  void widened_chunk(int chunk, const Groups& now, const Groups& later) {
    const Cell* cells[kChunkGroups];
    Scales scales;
    for (int g = 0; g < kChunkGroups; ++g) {
      scales.k[g] = (const float*)(now.k[g] + pages_.k_cells);
      scales.v[g] = (const float*)(now.v[g] + pages_.v_cells);
      prefetch_pages(later.k[g] + pages_.k_cells);
      prefetch_pages(later.v[g] + pages_.v_cells);
    }
    widen<typename Stored::Keys, false>(now.k, a_.head_size * kGroup / 2, cells);
    for (int r = 0; r < unit_->rows; r += kRowBlock) probabilities(r, chunk, cells, later.k, scales);
    widen<typename Stored::Values, true>(now.v, width_ * kGroup / 2, cells);
    for (int r = 0; r < unit_->rows; r += kRowBlock) values(r, chunk, cells, later.v);
  }

  template <class Code, bool of_values>
  void widen(const uint8_t* const* groups, int cells, const Cell** out) {
    for (int g = 0; g < kChunkGroups; ++g) {
      if (g > 0 && groups[g] == groups[g - 1]) {  // not seen by the tile
        out[g] = out[g - 1];
        continue;
      }
      Cell* own = widened_ + (size_t)g * cells;
      widen_group<Code, of_values>(groups[g], cells, own);
      out[g] = own;
    }
  }

  // Positions of the chunk that any row of the block sees, relative to the chunk; may be empty.
  Visible block_visible(int r, int rows, int chunk) const {
    return {maximum(unit_->visible[r].lo - chunk, 0), minimum(unit_->visible[r + rows - 1].hi - chunk, kChunk)};
  }

  void probabilities(int r, int chunk, const Cell* const* now, const StoredCell* const* later,
                     const Scales& scales) {
    int rows = minimum(kRowBlock, unit_->rows - r);
    Visible seen = block_visible(r, rows, chunk);
    if (seen.lo >= seen.hi) return;
    int first = seen.lo / kGroup, last = ceil_div(seen.hi, kGroup);
    alignas(64) float scores[kRowBlock * kChunk];
    const Operand* q = q_ + r * q_stride_;
    const int steps = a_.head_size / Pages::per_cell;
    const uint8_t* const* ahead = (const uint8_t* const*)later;
#define VX_SCORES(n)                                                                                       \
  case n:                                                                                                  \
    r == 0 ? score_groups<Pages, n, kKeyCells>(q, q_stride_, now, ahead, steps, first, last, scores)       \
           : score_groups<Pages, n, 0>(q, q_stride_, now, ahead, steps, first, last, scores);              \
    break;
    switch (rows) { VX_SCORES(1) VX_SCORES(2) VX_SCORES(3) VX_SCORES(4) }
#undef VX_SCORES
    for (int i = 0; i < rows; ++i) {
      factors_[r + i] = softmax_row<Pages, Stored::scaled>(
          scores + i * kChunk, chunk, first, last, unit_->visible[r + i], softmax_, scales,
          bias_of(a_, step_, *unit_, r + i), &maxima_[r + i], lane_sums_ + 16 * (r + i), p_ + (r + i) * p_stride);
    }
  }

  void values(int r, int chunk, const Cell* const* now, const StoredCell* const* later) {
    int rows = minimum(kRowBlock, unit_->rows - r);
    Visible seen = block_visible(r, rows, chunk);
    if (seen.lo >= seen.hi) return;
    int first = seen.lo / Pages::per_cell, last = ceil_div(seen.hi, Pages::per_cell);
    const Operand* p = p_ + r * p_stride;
    float* acc = acc_ + r * width_;
    const uint8_t* const* ahead = (const uint8_t* const*)later;
#define VX_VALUES(n)                                                                                       \
  case n:                                                                                                  \
    r == 0 ? value_rows<Pages, n, kValueCells>(p, p_stride, factors_ + r, now, ahead, width_, first, last, acc) \
           : value_rows<Pages, n, 0>(p, p_stride, factors_ + r, now, ahead, width_, first, last, acc);     \
    break;
    switch (rows) { VX_VALUES(1) VX_VALUES(2) VX_VALUES(3) VX_VALUES(4) }
#undef VX_VALUES
  }

  const PagedAttention& a_;
  const VxStep& step_;
  PageMap<Stored> pages_;
  int width_, q_stride_;
  SoftmaxParameters softmax_;
  const Unit* unit_ = nullptr;
  Groups next_;  // of the unit after this one, where it is expected
  bool expected_ = false;
  float* acc_;        // (rows, Dp)
  Operand *q_, *p_;   // (rows, D), (rows, kChunk)
  float* lane_sums_;  // (rows, 16)
  Cell* widened_;     // the keys or the values of a chunk, where pages hold codes
  float maxima_[kTileRows], factors_[kTileRows];
};

}  // namespace VX_ISA
}  // namespace vx
