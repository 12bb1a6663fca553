// Partitions of a unit over latents by vectors, in chunks of 64 positions, softmax and folds as in
// attention_vectors.h. Keys are as wide as the values and the rotated part together, wider than the
// first-level cache: both are worked off in slices of features. A slice changes speed alone: every score
// and every sum is one chain of multiply-adds in ascending order.
#pragma once
#include "attention_tile.h"
#include "latent_pages.h"

namespace vx {
namespace VX_ISA {

constexpr int kSliceCells = 64;                 // of keys, a quarter of the first-level cache
constexpr int kSliceFeatures = 16 * kWide;      // of values

// sums[r][position] += q_r . k over `steps` cells. keys: [steps][kChunk].
template <class Pages, int rows>
void add_scores(const typename Pages::Operand* q, int q_stride, const typename Pages::Cell* keys, int steps,
                float* sums) {
  for (int g = 0; g < kChunkGroups; g += kWide) {
    F32x16 acc[rows][kWide];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kWide; ++i) acc[r][i] = load(sums + r * kChunk + (g + i) * kGroup);
    for (int s = 0; s < steps; ++s) {
      typename Pages::Vector k[kWide];
#pragma GCC unroll 4
      for (int i = 0; i < kWide; ++i) k[i] = Pages::load(keys + s * kChunk + (g + i) * kGroup);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        typename Pages::Vector word = Pages::broadcast(q + r * q_stride + s);
#pragma GCC unroll 4
        for (int i = 0; i < kWide; ++i) acc[r][i] = Pages::dot(acc[r][i], k[i], word);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kWide; ++i) store(sums + r * kChunk + (g + i) * kGroup, acc[r][i]);
  }
}

// acc[r][feature] = acc * factor_r + sum over `steps` of p_r * v. values: [steps][kSliceFeatures].
template <class Pages, int rows>
void add_values(const typename Pages::Operand* p, int p_stride, const float* factors,
                const typename Pages::Cell* values, int steps, float* acc, int acc_stride) {
  F32x16 sums[rows][kWide];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kWide; ++i) sums[r][i] = load(acc + r * acc_stride + 16 * i) * splat(factors[r]);
  for (int s = 0; s < steps; ++s) {
    typename Pages::Vector v[kWide];
#pragma GCC unroll 4
    for (int i = 0; i < kWide; ++i) v[i] = Pages::load(values + s * kSliceFeatures + 16 * i);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      typename Pages::Vector word = Pages::broadcast(p + r * p_stride + s);
#pragma GCC unroll 4
      for (int i = 0; i < kWide; ++i) sums[r][i] = Pages::dot(sums[r][i], v[i], word);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kWide; ++i) store(acc + r * acc_stride + 16 * i, sums[r][i]);
}

template <class Latents>
class LatentPartition {
  typedef typename Latents::Pages Pages;
  typedef typename Pages::Operand Operand;
  typedef typename Pages::Cell Cell;

 public:
  LatentPartition(const VxAttention& a, const VxStep& step, float* room)
      : softmax_(softmax_parameters(a)), key_size_(a.head_size + a.rotary_dim),
        width_((a.head_size + kSliceFeatures - 1) / kSliceFeatures * kSliceFeatures),
        q_stride_(padded(key_size_) / Pages::per_cell), acc_(room), scores_(acc_ + kTileRows * width_),
        lane_sums_(scores_ + kTileRows * kChunk), q_((Operand*)(lane_sums_ + kTileRows * 16)),
        p_(q_ + kTileRows * q_stride_), slice_((Cell*)(p_ + kTileRows * p_stride)),
        chunk_(a, step, slice_ + kSliceCells * kChunk) {}

  void begin(const Unit& unit) { unit_ = &unit; }
  void expect(const Tile*, int) {}

  // Query r of the unit: C + Dr floats, padded with 0.
  void set_query(int r, const float* q) {
    for (int i = 0; i < padded(key_size_); i += 16) Pages::store_operand(q_ + r * q_stride_, i, load(q + i));
  }

  void run(int partition) {
    for (int r = 0; r < unit_->rows; ++r) maxima_[r] = kFloor;
    __builtin_memset(lane_sums_, 0, sizeof(float) * 16 * unit_->rows);
    __builtin_memset(acc_, 0, sizeof(float) * unit_->rows * width_);
    const int end = minimum((partition + 1) * kPartition, unit_->tile.keys.hi);
    for (int start = partition * kPartition; start < end; start += kChunk) {
      chunk_.find(unit_->tile, start);
      scores();
      softmax(start);
      values();
    }
  }

  // Of the partition that ran last.
  RowState state(int r) const { return {maxima_[r], reduce_add(load(lane_sums_ + 16 * r))}; }
  const float* sums(int r) const { return acc_ + r * width_; }

 private:
  static constexpr int p_stride = kChunk / Pages::per_cell;

  void scores() {
    __builtin_memset(scores_, 0, sizeof(float) * kChunk * unit_->rows);
    for (int first = 0; first < q_stride_; first += kSliceCells) {
      const int cells = minimum(kSliceCells, q_stride_ - first);
      chunk_.keys(first, cells, slice_);
      for (int r = 0; r < unit_->rows; r += kRowBlock) {
        const Operand* q = q_ + r * q_stride_ + first;
        float* sums = scores_ + r * kChunk;
        switch (minimum(kRowBlock, unit_->rows - r)) {
          case 1: add_scores<Pages, 1>(q, q_stride_, slice_, cells, sums); break;
          case 2: add_scores<Pages, 2>(q, q_stride_, slice_, cells, sums); break;
          case 3: add_scores<Pages, 3>(q, q_stride_, slice_, cells, sums); break;
          default: add_scores<Pages, kRowBlock>(q, q_stride_, slice_, cells, sums);
        }
      }
    }
  }

  // Groups of the chunk that a row sees; may be none.
  int seen(int r, int start) const { return ceil_div(minimum(unit_->visible[r].hi - start, kChunk), kGroup); }

  // Scores -> probabilities; 0 where a row does not see.
  void softmax(int start) {
    steps_ = 0;
    for (int r = 0; r < unit_->rows; ++r) {
      Operand* p = p_ + r * p_stride;
      const int last = maximum(seen(r, start), 0);
      factors_[r] = 1.0f;
      if (last > 0) {
        factors_[r] = softmax_row<Pages, false>(scores_ + r * kChunk, start, 0, last, unit_->visible[r], softmax_, {},
                                                nullptr, &maxima_[r], lane_sums_ + 16 * r, p);
      }
      for (int g = last; g < kChunkGroups; ++g) Pages::store_operand(p, g * kGroup, zero());
      steps_ = maximum(steps_, last * kGroup / Pages::per_cell);
    }
  }

  // Features behind the last vector of a row are left as they are: nobody reads their sums.
  void values() {
    for (int first = 0; first < width_; first += kSliceFeatures) {
      for (int i = 0; i < kSliceFeatures && first + i < key_size_; i += 16) chunk_.values(first + i, kSliceFeatures, slice_ + i);
      for (int r = 0; r < unit_->rows; r += kRowBlock) {
        const Operand* p = p_ + r * p_stride;
        const float* factors = factors_ + r;
        float* acc = acc_ + r * width_ + first;
        switch (minimum(kRowBlock, unit_->rows - r)) {
          case 1: add_values<Pages, 1>(p, p_stride, factors, slice_, steps_, acc, width_); break;
          case 2: add_values<Pages, 2>(p, p_stride, factors, slice_, steps_, acc, width_); break;
          case 3: add_values<Pages, 3>(p, p_stride, factors, slice_, steps_, acc, width_); break;
          default: add_values<Pages, kRowBlock>(p, p_stride, factors, slice_, steps_, acc, width_);
        }
      }
    }
  }

  SoftmaxParameters softmax_;
  int key_size_, width_, q_stride_, steps_ = 0;
  float* acc_;                    // (rows, C) of the partition, in whole slices
  float *scores_, *lane_sums_;    // (rows, kChunk), (rows, 16)
  Operand *q_, *p_;               // (rows, C + Dr), (rows, kChunk)
  Cell* slice_;                   // kSliceCells of keys, or kSliceFeatures of values
  LatentChunk<Latents> chunk_;
  const Unit* unit_ = nullptr;
  float maxima_[kTileRows], factors_[kTileRows];
};

}  // namespace VX_ISA
}  // namespace vx
