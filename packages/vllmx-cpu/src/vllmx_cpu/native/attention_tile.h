// The arithmetic of attention for a tile: rows of queries that share a kv head, against one chunk of
// positions. Three steps: scores (lanes = positions), softmax update, values (lanes = features).
//
// Each step is a register block of a few rows by a few vectors. The block's shape changes speed alone:
// every (row, position) score and every (row, feature) sum is one chain of multiply-adds in ascending
// order of features (positions), so a row has the same bits in any tile. Positions that a row does
// not see have probability 0 and leave its sums as they are.
#pragma once
#include "attention_pages.h"
#include "exp2.h"

namespace vx {
namespace VX_ISA {

constexpr int kRowBlock = 4;                            // rows of a register block
constexpr int kWide = VX_NATIVE_BYTES == 64 ? 4 : 1;    // vectors of 16 lanes of a register block
constexpr int kChunkGroups = kChunk / kGroup;
constexpr float kFloor = -1e30f;                        // running maximum before the first score

// tanh, relative error under 3e-7 (Cephes' split: a polynomial below 0.625, exp above).
VX_INLINE F32x16 tanh_accurate(F32x16 x) {
  F32x16 magnitude = abs(x), square = x * x;
  F32x16 e = exp2_nonpositive(magnitude * splat(-2.0f * kLog2e));
  F32x16 large = (splat(1.0f) - e) / (splat(1.0f) + e);
  F32x16 p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  F32x16 small = fma(p * square, x, x);
  return select(magnitude < splat(0.625f), small, copysign(large, x));
}

// What a row has of a partition (or of all partitions so far), in units of log2.
struct RowState {
  float maximum;
  float sum;
};

// The positions lo ... hi - 1 that a row sees.
struct Visible {
  int lo, hi;
};

// --- scores ----------------------------------------------------------------------------------------
// Each step takes the groups of a later chunk, `ahead`, on their way into the cache while it computes:
// `cells_per` is how many of its cells one of theirs makes (2 or 4 where they are codes), 0 for none.
//
// out[r][position in chunk] = q_r . k for `rows` rows and `groups` groups.
template <class Pages, int rows, int groups, int cells_per>
void score_block(const typename Pages::Operand* q, int q_stride, const typename Pages::Cell* const* keys,
                 const uint8_t* const* ahead, int steps, float* out) {
  constexpr int bytes = kGroup * sizeof(typename Pages::Cell);
  F32x16 sums[rows][groups];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < groups; ++g) sums[r][g] = zero();
  for (int s = 0; s < steps; ++s) {
    typename Pages::Vector k[groups];
#pragma GCC unroll 4
    for (int g = 0; g < groups; ++g) {
      k[g] = Pages::load(keys[g] + s * kGroup);
      if (cells_per && s % cells_per == 0) prefetch_pages(ahead[g] + s * bytes / cells_per);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      typename Pages::Vector word = Pages::broadcast(q + r * q_stride + s);
#pragma GCC unroll 4
      for (int g = 0; g < groups; ++g) sums[r][g] = Pages::dot(sums[r][g], k[g], word);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < groups; ++g) store(out + r * kChunk + g * kGroup, sums[r][g]);
}

// Groups first ... last - 1 of the chunk. A register block may reach past them: it computes on the
// nearest group again, and nobody reads that.
template <class Pages, int rows, int cells_per>
void score_groups(const typename Pages::Operand* q, int q_stride, const typename Pages::Cell* const* keys,
                  const uint8_t* const* ahead, int steps, int first, int last, float* out) {
  constexpr int narrow = kWide > 1 ? kWide / 2 : 1;
  const typename Pages::Cell* clamped[kWide];
  for (int g = first - first % narrow; g < last;) {
    bool is_wide = g % kWide == 0 && last - g > narrow;
    for (int i = 0; i < kWide; ++i) {
      clamped[i] = keys[g + i < first ? first : g + i < last ? g + i : last - 1];
    }
    if (is_wide) {
      score_block<Pages, rows, kWide, cells_per>(q, q_stride, clamped, ahead + g, steps, out + g * kGroup);
    } else {
      score_block<Pages, rows, narrow, cells_per>(q, q_stride, clamped, ahead + g, steps, out + g * kGroup);
    }
    g += is_wide ? kWide : narrow;
  }
}

// --- softmax ---------------------------------------------------------------------------------------
struct SoftmaxParameters {
  float scale;    // of a raw score, log2(e) included unless there is a soft-cap
  float softcap;  // 0 = none
};
VX_INLINE SoftmaxParameters softmax_parameters(const VxAttention& a) {
  return {a.softcap != 0.0f ? a.scale / a.softcap : a.scale * kLog2e, a.softcap};
}

// The scales of a chunk's groups, 16 each, where the pages have any.
struct Scales {
  const float *k[kChunkGroups], *v[kChunkGroups];
};

VX_INLINE I32x16 visible_lanes(int position, Visible visible) {
  I32x16 positions = lane_index() + splat_i32(position);
  return (positions >= splat_i32(visible.lo)) & (positions < splat_i32(visible.hi));
}

// One row's scores of groups first ... last - 1 -> probabilities in `out` (positions of the chunk,
// times the scales of their values; 0 where the row does not see), maximum and lane sums updated.
// `bias`: see `bias_of`.
// Returns the factor for older sums.
template <class Pages, bool scaled>
VX_INLINE float softmax_row(const float* scores, int chunk_start, int first, int last, Visible visible,
                            SoftmaxParameters parameters, const Scales& scales, const float* bias,
                            float* maximum, float* lane_sums, typename Pages::Operand* out) {
  F32x16 x[kChunkGroups], greatest = splat(kFloor);
  bool whole = visible.lo <= chunk_start + first * kGroup && visible.hi >= chunk_start + last * kGroup;
  for (int g = first; g < last; ++g) {
    F32x16 s = load(scores + g * kGroup) * splat(parameters.scale);
    if (scaled) s = s * load(scales.k[g]);
    if (parameters.softcap != 0.0f) s = tanh_accurate(s) * splat(parameters.softcap * kLog2e);
    if (bias) s = fma(load(bias + chunk_start + g * kGroup), splat(kLog2e), s);
    if (!whole) s = select(visible_lanes(chunk_start + g * kGroup, visible), s, splat(2.0f * kFloor));
    x[g - first] = s;
    greatest = max(greatest, s);
  }
  float before = *maximum, chunk_maximum = reduce_max(greatest);
  float after = chunk_maximum > before ? chunk_maximum : before;
  float factor = 1.0f;
  F32x16 sums = load(lane_sums);
  if (after != before) {
    F32x16 factors = exp2_nonpositive(splat(before - after));
    store_n(&factor, factors, 1);
    sums = sums * factors;
    *maximum = after;
  }
  for (int g = first; g < last; ++g) {
    F32x16 p = exp2_nonpositive(x[g - first] - splat(after));
    F32x16 weight = scaled ? p * load(scales.v[g]) : p;
    if (!whole) {
      I32x16 seen = visible_lanes(chunk_start + g * kGroup, visible);
      p = select(seen, p, zero()), weight = select(seen, weight, zero());
    }
    sums = sums + p;
    Pages::store_operand(out, g * kGroup, weight);
  }
  store(lane_sums, sums);
  return factor;
}

// --- values ----------------------------------------------------------------------------------------
// acc[r][16 * vector ...] = acc * factor_r + sum over positions of p_r * v, for `vectors` vectors.
// values[g] + step * v_width is the row of a step; steps first ... last - 1 of the chunk.
template <class Pages, int rows, int vectors, int cells_per>
void value_block(const typename Pages::Operand* p, int p_stride, const float* factors,
                 const typename Pages::Cell* const* values, const uint8_t* const* ahead, int v_width,
                 int first, int last, float* acc) {
  constexpr int group_steps = kGroup / Pages::per_cell;
  constexpr int bytes = 16 * sizeof(typename Pages::Cell);
  const int row_bytes = cells_per ? v_width * (int)sizeof(typename Pages::Cell) / cells_per : 0;
  F32x16 sums[rows][vectors];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) sums[r][i] = load(acc + r * v_width + 16 * i) * splat(factors[r]);
  for (int s = first; s < last;) {
    int group = s / group_steps, end = (group + 1) * group_steps < last ? (group + 1) * group_steps : last;
    const typename Pages::Cell* cells = values[group] + (size_t)(s % group_steps) * v_width;
    const uint8_t* far = cells_per ? ahead[group] + (s % group_steps) * row_bytes : nullptr;
    for (; s < end; ++s, cells += v_width) {
      typename Pages::Vector v[vectors];
#pragma GCC unroll 8
      for (int i = 0; i < vectors; ++i) {
        v[i] = Pages::load(cells + 16 * i);
        if (cells_per && i % cells_per == 0) prefetch_pages(far + i * bytes / cells_per);
      }
      if (cells_per) far += row_bytes;
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        typename Pages::Vector word = Pages::broadcast(p + r * p_stride + s);
#pragma GCC unroll 8
        for (int i = 0; i < vectors; ++i) sums[r][i] = Pages::dot(sums[r][i], v[i], word);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) store(acc + r * v_width + 16 * i, sums[r][i]);
}

// All features of `rows` rows.
template <class Pages, int rows, int cells_per>
void value_rows(const typename Pages::Operand* p, int p_stride, const float* factors,
                const typename Pages::Cell* const* values, const uint8_t* const* ahead, int v_width,
                int first, int last, float* acc) {
  constexpr int wide = rows <= 2 ? 2 * kWide : kWide;
  const typename Pages::Cell* from[kChunkGroups];
  const uint8_t* far[kChunkGroups];
  for (int i = 0; i < v_width;) {
    for (int g = 0; g < kChunkGroups; ++g) {
      from[g] = values[g] + i;
      if (cells_per) far[g] = ahead[g] + i * sizeof(typename Pages::Cell) / cells_per;
    }
    if (v_width - i >= 16 * wide) {
      value_block<Pages, rows, wide, cells_per>(p, p_stride, factors, from, far, v_width, first, last, acc + i);
      i += 16 * wide;
    } else {
      value_block<Pages, rows, 1, cells_per>(p, p_stride, factors, from, far, v_width, first, last, acc + i);
      i += 16;
    }
  }
}

// --- folding ---------------------------------------------------------------------------------------
// total += one partition's (state, acc), both relative to their own maxima.
VX_INLINE void fold_partition(RowState* total, float* total_acc, RowState part, const float* acc, int v_width) {
  float maximum = part.maximum > total->maximum ? part.maximum : total->maximum;
  F32x16 old_factor = exp2_nonpositive(splat(total->maximum - maximum));
  F32x16 new_factor = exp2_nonpositive(splat(part.maximum - maximum));
  float factors[2];
  store_n(&factors[0], old_factor, 1);
  store_n(&factors[1], new_factor, 1);
  total->maximum = maximum;
  total->sum = total->sum * factors[0] + part.sum * factors[1];
  for (int i = 0; i < v_width; i += 16) {
    store(total_acc + i, fma(load(acc + i), new_factor, load(total_acc + i) * old_factor));
  }
}

}  // namespace VX_ISA
}  // namespace vx
