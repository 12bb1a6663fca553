// A unit of attention on one thread: queries in, partition after partition, output.
#pragma once
#include "attention_codes.h"
#include "attention_cut.h"
#include "attention_heads.h"

namespace vx {
namespace VX_ISA {

// One unit, or one piece of it, on one thread. Stored: the pages; Pages: what is computed with.
template <class Stored>
class Worker {
  typedef typename Stored::Arithmetic Pages;
  typedef typename Pages::Operand Operand;
  typedef typename Pages::Cell Cell;

 public:
  Worker(const VxAttention& a, const VxStep& step, uint8_t* scratch)
      : a_(a), step_(step), pages_(a), width_(padded(a.head_size)), q_stride_(width_ / Pages::per_cell) {
    softmax_ = {a.softcap != 0.0f ? a.scale / a.softcap : a.scale * kLog2e, a.softcap};
    acc_ = (float*)scratch;
    total_acc_ = acc_ + kTileRows * width_;
    q_ = (Operand*)(total_acc_ + kTileRows * width_);
    p_ = q_ + kTileRows * q_stride_;
    lane_sums_ = (float*)(p_ + kTileRows * p_stride);
    widened_ = (Cell*)(lane_sums_ + kTileRows * 16);
  }

  // Heads first_head ... of the tile. Must come before `run`.
  void begin(const Tile& tile, int kv_head, int first_head, int heads) {
    tile_ = tile, kv_head_ = kv_head, first_head_ = first_head, heads_ = heads;
    rows_ = tile.tokens * heads;
    size_t stride = (size_t)(a_.num_heads + 2 * a_.num_kv_heads) * a_.head_size;
    float prepared[kMaxHeadSize];
    for (int r = 0; r < rows_; ++r) {
      int token = tile.token + r / heads, head = first_head + r % heads;
      const float* q = a_.qkv + token * stride + (size_t)head * a_.head_size;
      if (token + 2 < step_.T) prefetch_head(q + 2 * stride, a_.head_size);
      prepare_head(a_, q, a_.q_norm, step_.positions[token], prepared);
      for (int i = 0; i < width_; i += 16) Pages::store_operand(q_ + r * q_stride_, i, load(prepared + i));
      visible_[r] = visible_to(a_, step_, tile.row, token);
    }
  }

  // All partitions of the unit, to the output.
  void run_whole() {
    for (int r = 0; r < rows_; ++r) totals_[r] = {kFloor, 0.0f};
    __builtin_memset(total_acc_, 0, sizeof(float) * rows_ * width_);
    int first = first_partition(tile_);
    for (int i = first; i < first + partitions(tile_); ++i) {
      run_partition(i);
      for (int r = 0; r < rows_; ++r) {
        fold_partition(&totals_[r], total_acc_ + r * width_, state(r), acc_ + r * width_, width_);
      }
    }
    for (int r = 0; r < rows_; ++r) write_row(r, totals_[r], total_acc_ + r * width_);
  }

  // Partitions from ... to - 1 of the unit (0 = its first), each to its own states.
  void run_piece(int from, int to, float* states, size_t state_floats) {
    for (int i = from; i < to; ++i) {
      run_partition(first_partition(tile_) + i);
      for (int r = 0; r < rows_; ++r) {
        float* slot = states + ((size_t)i * rows_ + r) * state_floats;
        slot[0] = maxima_[r];
        slot[1] = state(r).sum;
        __builtin_memcpy(slot + 16, acc_ + r * width_, sizeof(float) * width_);
      }
    }
  }

  // Folds what `run_piece` left for all partitions and writes the output.
  void combine(const float* states, size_t state_floats) {
    for (int r = 0; r < rows_; ++r) {
      RowState total = {kFloor, 0.0f};
      __builtin_memset(total_acc_, 0, sizeof(float) * width_);
      for (int i = 0; i < partitions(tile_); ++i) {
        const float* slot = states + ((size_t)i * rows_ + r) * state_floats;
        fold_partition(&total, total_acc_, {slot[0], slot[1]}, slot + 16, width_);
      }
      write_row(r, total, total_acc_);
    }
  }

 private:
  static constexpr int p_stride = kChunk / Pages::per_cell;

  static constexpr int kCellsPer = Stored::scaled ? 2 : 1;
  typedef typename Stored::Cell StoredCell;

  struct Groups {
    const StoredCell *k[kChunkGroups], *v[kChunkGroups];
  };

  RowState state(int r) const { return {maxima_[r], reduce_add(load(lane_sums_ + 16 * r))}; }

  // The groups of a chunk; those outside of what the tile sees repeat the nearest one.
  void find_groups(int chunk_start, Groups* groups) const {
    int lo = tile_.keys.lo / kGroup, hi = (tile_.keys.hi - 1) / kGroup;
    const int32_t* table = step_.block_table + (size_t)tile_.row * step_.block_stride;
    for (int g = 0; g < kChunkGroups; ++g) {
      int group = minimum(maximum(chunk_start / kGroup + g, lo), hi);
      int block = table[group / pages_.groups_per_block], inside = group % pages_.groups_per_block;
      groups->k[g] = pages_.k_group(block, kv_head_, inside);
      groups->v[g] = pages_.v_group(block, kv_head_, inside);
    }
  }

  void run_partition(int partition) {
    for (int r = 0; r < rows_; ++r) maxima_[r] = kFloor;
    __builtin_memset(lane_sums_, 0, sizeof(float) * 16 * rows_);
    __builtin_memset(acc_, 0, sizeof(float) * rows_ * width_);
    int start = maximum(partition * kPartition, tile_.keys.lo / kChunk * kChunk);
    int end = minimum((partition + 1) * kPartition, tile_.keys.hi);
    for (int chunk = start; chunk < end; chunk += kChunk) {
      Groups now, later;
      find_groups(chunk, &now);
      find_groups(chunk + kChunk, &later);
      if constexpr (Stored::scaled) {
        widened_chunk(chunk, now, later);
      } else {
        for (int r = 0; r < rows_; r += kRowBlock) probabilities(r, chunk, now.k, later.k, {});
        for (int r = 0; r < rows_; r += kRowBlock) values(r, chunk, now.v, later.v);
      }
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
    widen(now.k, pages_.k_cells / 2, cells);
    for (int r = 0; r < rows_; r += kRowBlock) probabilities(r, chunk, cells, later.k, scales);
    widen(now.v, pages_.v_cells / 2, cells);
    for (int r = 0; r < rows_; r += kRowBlock) values(r, chunk, cells, later.v);
  }

  void widen(const uint8_t* const* groups, int cells, const Cell** out) {
    for (int g = 0; g < kChunkGroups; ++g) {
      if (g > 0 && groups[g] == groups[g - 1]) {  // not seen by the tile
        out[g] = out[g - 1];
        continue;
      }
      Cell* own = widened_ + (size_t)g * cells;
      widen_group<typename Stored::Kind>(groups[g], cells, own);
      out[g] = own;
    }
  }

  // Positions of the chunk that any row of the block sees, relative to the chunk; may be empty.
  Visible block_visible(int r, int rows, int chunk) const {
    return {maximum(visible_[r].lo - chunk, 0), minimum(visible_[r + rows - 1].hi - chunk, kChunk)};
  }

  void probabilities(int r, int chunk, const Cell* const* now, const StoredCell* const* later,
                     const Scales& scales) {
    int rows = minimum(kRowBlock, rows_ - r);
    Visible seen = block_visible(r, rows, chunk);
    if (seen.lo >= seen.hi) return;
    int first = seen.lo / kGroup, last = ceil_div(seen.hi, kGroup);
    alignas(64) float scores[kRowBlock * kChunk];
    const Operand* q = q_ + r * q_stride_;
    const int steps = a_.head_size / Pages::per_cell;
    const uint8_t* const* ahead = (const uint8_t* const*)later;
#define VX_SCORES(n)                                                                                       \
  case n:                                                                                                  \
    r == 0 ? score_groups<Pages, n, kCellsPer>(q, q_stride_, now, ahead, steps, first, last, scores)       \
           : score_groups<Pages, n, 0>(q, q_stride_, now, ahead, steps, first, last, scores);              \
    break;
    switch (rows) { VX_SCORES(1) VX_SCORES(2) VX_SCORES(3) VX_SCORES(4) }
#undef VX_SCORES
    for (int i = 0; i < rows; ++i) {
      factors_[r + i] = softmax_row<Pages, Stored::scaled>(
          scores + i * kChunk, chunk, first, last, visible_[r + i], softmax_, scales, &maxima_[r + i],
          lane_sums_ + 16 * (r + i), p_ + (r + i) * p_stride);
    }
  }

  void values(int r, int chunk, const Cell* const* now, const StoredCell* const* later) {
    int rows = minimum(kRowBlock, rows_ - r);
    Visible seen = block_visible(r, rows, chunk);
    if (seen.lo >= seen.hi) return;
    int first = seen.lo / Pages::per_cell, last = ceil_div(seen.hi, Pages::per_cell);
    const Operand* p = p_ + r * p_stride;
    float* acc = acc_ + r * width_;
    const uint8_t* const* ahead = (const uint8_t* const*)later;
#define VX_VALUES(n)                                                                                       \
  case n:                                                                                                  \
    r == 0 ? value_rows<Pages, n, kCellsPer>(p, p_stride, factors_ + r, now, ahead, width_, first, last, acc) \
           : value_rows<Pages, n, 0>(p, p_stride, factors_ + r, now, ahead, width_, first, last, acc);     \
    break;
    switch (rows) { VX_VALUES(1) VX_VALUES(2) VX_VALUES(3) VX_VALUES(4) }
#undef VX_VALUES
  }

  void write_row(int r, RowState total, const float* acc) const {
    int token = tile_.token + r / heads_, head = first_head_ + r % heads_;
    float factor = 1.0f;
    if (a_.sinks) {
      float sink = a_.sinks[head] * kLog2e, top = sink > total.maximum ? sink : total.maximum, share;
      store_n(&factor, exp2_nonpositive(splat(total.maximum - top)), 1);
      store_n(&share, exp2_nonpositive(splat(sink - top)), 1);
      total.sum = total.sum * factor + share;
    }
    factor /= total.sum;
    size_t index = ((size_t)token * a_.num_heads + head) * a_.head_size;
    alignas(64) float row[kMaxHeadSize];
    for (int i = 0; i < width_; i += 16) store(row + i, load(acc + i) * splat(factor));
    if (a_.out_dtype == VX_F32) {
      __builtin_memcpy((float*)a_.out + index, row, sizeof(float) * a_.head_size);
      return;
    }
    alignas(64) uint16_t words[kMaxHeadSize];
    for (int i = 0; i < width_; i += 16) {
      a_.out_dtype == VX_BF16 ? store_bf16(words + i, load(row + i)) : store_f16(words + i, load(row + i));
    }
    __builtin_memcpy((uint16_t*)a_.out + index, words, sizeof(uint16_t) * a_.head_size);
  }

  const VxAttention& a_;
  const VxStep& step_;
  PageMap<Stored> pages_;
  int width_, q_stride_;
  SoftmaxParameters softmax_;
  Tile tile_;
  int kv_head_, first_head_, heads_, rows_;
  float *acc_, *total_acc_;  // (rows, Dp) of this partition; of those before it
  Operand *q_, *p_;          // (rows, D), (rows, kChunk)
  float* lane_sums_;         // (rows, 16)
  Cell* widened_;            // the keys or the values of a chunk, where pages hold codes
  float maxima_[kTileRows], factors_[kTileRows];
  RowState totals_[kTileRows];
  Visible visible_[kTileRows];
};

}  // namespace VX_ISA
}  // namespace vx
