// Partitions of a unit by AMX tiles, from bf16 pages as they lie or from widened codes.
//
// A K group is B of a product as it lies: 32 features of 16 positions are a tile; a V group gives the
// eight pairs of its positions for 16 features. All scores of a partition come first, so that its
// maximum is known before the first power of two and no sum is ever rescaled. Two blocks of 16
// rows share each tile of keys and values on its way from the second-level cache.
//
// Codes become such groups in rooms of this thread. A tile of them is widened by the vector units while
// those of earlier codes are multiplied by the tile unit: for the unit's first rows, and the others
// find it there. Where there are no others a ring of few rooms stays in the first-level cache.
//
// A score adds its features in steps of 32, a sum its positions in steps of 16 from the partition's
// first on; rows are independent. So the bits do not depend on the other rows. They are not those of
// attention_vectors.h.
#pragma once
#include "attention_codes.h"
#include "attention_cut.h"
#include "tile_products.h"

namespace vx {
namespace VX_ISA {

// Stored: the pages, of bf16 or of codes.
template <class Stored>
class TilePartition {
  typedef typename Stored::Cell StoredCell;

 public:
  TilePartition(const PagedAttention& a, const VxStep& step, float* room)
      : a_(a), step_(step), pages_(a), softmax_(softmax_parameters(a)), width_(padded(a.head_size)),
        key_tiles_((a.head_size + 31) / 32) {
    acc_ = room;
    scores_ = acc_ + kTileRows * width_;
    q_ = (uint32_t*)(scores_ + 32 * kScoreStride);
    p_ = q_ + kTileRows * key_tiles_ * 16;
    keys_ = p_ + kTileRows * kPartition / 2;
    values_ = keys_ + (Stored::scaled ? kGroups : kColumns) * key_tiles_ * 256;
  }

  void begin(const Unit& unit) {
    unit_ = &unit;
    num_next_ = 0;
    blocks_ = ceil_div(unit.rows, 16);
    alone_ = blocks_ == 1;
    shapes_.set_attention(blocks_ > 1 ? 16 : unit.rows);
  }

  // The tile and the kv head that come after this unit (null: unknown).
  void expect(const Tile* tile, int kv_head) {
    if (!tile) return;
    const int first = first_group(*tile);
    num_next_ = minimum(kAhead, last_group(*tile) + 1 - first);
    for (int i = 0; i < num_next_; ++i) next_[i] = find_group(*tile, kv_head, first + i);
  }

  // Query r of the unit, Dp floats.
  void set_query(int r, const float* q) {
    uint32_t* row = q_ + r * key_tiles_ * 16;
    for (int i = 0; i < width_; i += 16) Bf16Pages::store_operand(row, i, load(q + i));
    if (width_ % 32) __builtin_memset(row + width_ / 2, 0, 32);
  }

  void run(int partition) {
    find_groups(partition);
    if constexpr (!Stored::scaled) stage_values();
    for (int b = 0; b < blocks_; b += 2) {
      blocks_ - b > 1 ? run_blocks<2, 2>(b) : run_blocks<1, 4>(b);
    }
  }

  // Of the partition that ran last.
  RowState state(int r) const { return states_[r]; }
  const float* sums(int r) const { return acc_ + r * width_; }

 private:
  static constexpr int kGroups = kPartition / kGroup;
  static constexpr int kColumns = 4;
  // Groups from what is computed with to what is fetched; keys of codes are widened kColumns ahead.
  static constexpr int kAhead = Stored::scaled ? 3 * kColumns : kColumns;
  static constexpr int kScoreStride = kPartition + 16;  // rows of scores in different sets of the cache

  // In pages, of two features or positions.
  static constexpr int kKeyBytes = 2 * sizeof(StoredCell) / Stored::keys_per_cell;
  static constexpr int kValueBytes = 2 * sizeof(StoredCell) / Stored::values_per_cell;
  static constexpr int kLineFeatures = 64 / kValueBytes;  // of a pair's values

  struct Group {
    const StoredCell *k, *v;
    int v_bytes;  // as far as positions are seen
  };

  // The groups first_ ... last_ - 1 of the partition are seen by the tile.
  void find_groups(int partition) {
    const Tile& tile = unit_->tile;
    start_ = partition * kPartition;
    first_ = maximum(tile.keys.lo - start_, 0) / kGroup;
    last_ = ceil_div(minimum(tile.keys.hi - start_, kPartition), kGroup);
    for (int g = first_; g < last_; ++g) groups_[g] = find_group(tile, unit_->heads.kv_head, start_ / kGroup + g);
    if (alone_) find_later();
  }

  // What is fetched while a group is computed with: the unit's own groups, then the first of the next.
  void find_later() {
    const Tile& tile = unit_->tile;
    const int end = last_group(tile) + 1 - start_ / kGroup;
    num_own_ = end - kAhead;
    const int carrying = maximum(first_, last_ - kAhead);
    for (int g = first_; g < last_; ++g) {
      if (g + kAhead < last_) {
        later_[g] = groups_[g + kAhead];
      } else if (g + kAhead < end) {
        later_[g] = find_group(tile, unit_->heads.kv_head, start_ / kGroup + g + kAhead);
      } else {
        later_[g] = end == last_ && g - carrying < num_next_ ? next_[g - carrying] : Group{};
      }
    }
    if (end > last_) return;
    for (int i = last_ - carrying; i < num_next_; ++i) {  // more than this unit has groups
      for (int s = 0; s < key_tiles_; ++s) fetch_keys(next_[i], s);
      for (int feature = 0; feature < width_; feature += 16) fetch_values(next_[i], false, feature);
    }
  }

  Group find_group(const Tile& tile, int kv_head, int group) const {
    const int32_t* table = step_.block_tables + (size_t)tile.row * step_.block_stride;
    const int block = table[group / pages_.groups_per_block], inside = group % pages_.groups_per_block;
    return {pages_.k_group(block, kv_head, inside), pages_.v_group(block, kv_head, inside),
            minimum((tile.keys.hi - group * kGroup + 1) / 2, kGroup / 2) * width_ * kValueBytes};
  }

  // Into the cache, where a tile of few rows would wait for memory.
  template <int lines>
  VX_INLINE void fetch(const void* p, int stride = 64) {
    unrolled<lines>([&](auto i) __attribute__((always_inline)) { prefetch_pages((const uint8_t*)p + i.value * stride); });
  }

  // Step s of a group's keys.
  void fetch_keys(const Group& later, int s) const {
    if (!later.k) return;
    fetch<4 * kKeyBytes>((const uint8_t*)later.k + s * 256 * kKeyBytes);
    if (Stored::scaled && s == 0) fetch<1>(later.k + pages_.k_cells);
  }

  // A part of a group's values while 16 features are computed with: of this unit those features, which
  // the next groups of this pass need first; of the next unit one row after the other.
  void fetch_values(const Group& later, bool own, int feature) const {
    const int from = feature * kValueBytes * (own ? 1 : 8);
    if (feature % kLineFeatures || from >= later.v_bytes) return;
    fetch<8>((const uint8_t*)later.v + from, own ? width_ * kValueBytes : 64);
    if (Stored::scaled && feature == 0) fetch<1>(later.v + pages_.v_cells);
  }

  // Group g's tiles of keys; in room `column`, padded with zeros, where the last would not be whole.
  const uint8_t* key_group(int g, int column) {
    if constexpr (Stored::scaled) return (const uint8_t*)key_room(g);
    if (a_.head_size % 32 == 0) return (const uint8_t*)groups_[g].k;
    uint32_t* out = keys_ + column * key_tiles_ * 256;
    const int cells = a_.head_size * 8;
    __builtin_memcpy(out, groups_[g].k, cells * sizeof *out);
    for (int i = cells; i < key_tiles_ * 256; i += 16) store_u32(out + i, splat_u32(0));
    return (const uint8_t*)out;
  }

  // Where codes of group g become cells. Values have 16 cells to spare: see `widen_group`.
  uint32_t* key_room(int g) const { return keys_ + (blocks_ > 2 ? g : g % (2 * kColumns)) * key_tiles_ * 256; }
  uint32_t* value_room(int g) const { return values_ + (blocks_ > 2 ? g : g % 2) * (width_ * 8 + 16); }

  // Tile s of a group's keys. Called from many places: kept out of them.
  static __attribute__((noinline)) void widen_keys(const uint8_t* k, int head_size, uint32_t* room, int s) {
    const int cells = head_size * 8 - s * 256;
    uint32_t* out = room + s * 256;
    const uint8_t* codes = k + s * 256 * kKeyBytes;
    if (cells >= 256) {
      return unrolled<8>([&](auto i) {
        widen_group<typename Stored::Keys, false>(codes + i.value * 32 * kKeyBytes, 32, out + i.value * 32);
      });
    }
    widen_group<typename Stored::Keys, false>(codes, cells, out);
    for (int i = cells; i < 256; i += 16) store_u32(out + i, splat_u32(0));
  }

  // The tiles of features feature ... feature + 31 of a group's values.
  static __attribute__((noinline)) void widen_values(const uint8_t* v, int width, uint32_t* room) {
    unrolled<8>([&](auto i) {
      widen_group<typename Stored::Values, true>(v + i.value * kValueBytes * width, 32, room + i.value * width);
    });
  }

  template <int blocks, int columns>
  void run_blocks(int block) {
    const int rows = minimum(16 * blocks, unit_->rows - 16 * block);
    const bool widens = Stored::scaled && block == 0;
    scores<blocks, columns>(16 * block, widens);
    for (int r = 0; r < rows; ++r) softmax(16 * block + r, scores_ + r * kScoreStride);
    values<blocks, columns>(16 * block, widens);
  }

  template <int blocks, int columns>
  void scores(int row, bool widens) {
    const int64_t row_bytes = key_tiles_ * 64;
    const TileOperands o = {(const uint8_t*)q_ + row * row_bytes, 16 * row_bytes, 64, row_bytes,
                            64, 16 * kScoreStride, kScoreStride * sizeof(float)};
    int g = first_;
    if constexpr (Stored::scaled) {
      for (; widens && g < minimum(first_ + columns, last_); ++g) {
        for (int s = 0; s < key_tiles_; ++s) widen_keys(groups_[g].k, a_.head_size, key_room(g), s);
      }
      g = first_;
    }
    for (; last_ - g >= columns; g += columns) score_groups<blocks, columns>(g, o, widens);
    unrolled<columns>([&](auto rest) {
      if constexpr (rest.value > 0) {
        if (last_ - g == rest.value) score_groups<blocks, rest.value>(g, o, false);
      }
    });
  }

  template <int blocks, int columns>
  void score_groups(int g, const TileOperands& o, bool widens) {
    const uint8_t* keys[columns];
    float* out[columns];
    const StoredCell* next[columns];
    uint32_t* room[columns];
    for (int i = 0; i < columns; ++i) {
      keys[i] = key_group(g + i, i), out[i] = scores_ + (g + i) * kGroup;
      const int later = g + columns + i;
      const bool widened = widens && later < last_;
      next[i] = widened ? groups_[later].k : nullptr;
      room[i] = widened ? key_room(later) : nullptr;
    }
    const int head_size = a_.head_size;
    multiply_tiles<blocks, columns, TILE_QUERY, TILE_KEY>(
        o, 0, key_tiles_,
        [&](int s, int column) {
          if (blocks == 1 && alone_) fetch_keys(later_[g + column], s);
          if constexpr (Stored::scaled) {
            if (room[column]) widen_keys(next[column], head_size, room[column], s);
          }
          return keys[column] + s * TILE_BYTES;
        },
        out);
  }

  // Row r's scores, `s` -> probabilities; 0 where it does not see.
  void softmax(int r, float* s) {
    uint32_t* p = p_ + r * kPartition / 2;
    const Visible seen = {maximum(unit_->visible[r].lo - start_, first_ * kGroup),
                          minimum(unit_->visible[r].hi - start_, last_ * kGroup)};
    const bool any = seen.lo < seen.hi;
    const int first = any ? seen.lo / kGroup : last_, last = any ? ceil_div(seen.hi, kGroup) : last_;
    for (int g = first_; g < first; ++g) Bf16Pages::store_operand(p, g * kGroup, zero());
    for (int g = last; g < last_; ++g) Bf16Pages::store_operand(p, g * kGroup, zero());
    states_[r] = {kFloor, 0.0f};
    if (!any) return;
    const float scale = prepare_scores(s, bias_of(a_, step_, *unit_, r), first, last);
    const int edges[2] = {first, last - 1};
    const int from = seen.lo % kGroup ? first + 1 : first, to = seen.hi % kGroup ? last - 1 : last;
    for (int g : edges) {
      const I32x16 lanes = visible_lanes(g * kGroup, seen);
      store(s + g * kGroup, select(lanes, load(s + g * kGroup), splat(-3e38f)));
    }
    F32x16 greatest = splat(kFloor);
    for (int g = first; g < last; ++g) greatest = max(greatest, load(s + g * kGroup) * splat(scale));
    const float maximum = reduce_max(greatest);
    F32x16 sums = zero();
    auto group = [&](int g, auto whole) {
      F32x16 weight = exp2_nonpositive(load(s + g * kGroup) * splat(scale) - splat(maximum));
      if (!whole.value) weight = select(visible_lanes(g * kGroup, seen), weight, zero());
      sums = sums + weight;
      if constexpr (Stored::scaled) {
        weight = weight * load(value_scales(g));
        if (!whole.value) weight = select(visible_lanes(g * kGroup, seen), weight, zero());
      }
      Bf16Pages::store_operand(p, g * kGroup, weight);
    };
    if (from > first) group(first, std::false_type());
    for (int g = from; g < to; ++g) group(g, std::true_type());
    if (to < last && to >= from) group(to, std::false_type());
    states_[r] = {maximum, reduce_add(sums)};
  }

  const float* key_scales(int g) const { return (const float*)(groups_[g].k + pages_.k_cells); }
  const float* value_scales(int g) const { return (const float*)(groups_[g].v + pages_.v_cells); }

  // Scales of keys, soft-cap and bias into the scores; returns the factor that is left.
  float prepare_scores(float* s, const float* bias, int first, int last) const {
    const bool capped = softmax_.softcap != 0.0f;
    if (!capped && !Stored::scaled && !bias) return softmax_.scale;
    for (int g = first; g < last; ++g) {
      F32x16 x = load(s + g * kGroup) * splat(softmax_.scale);
      if constexpr (Stored::scaled) x = x * load(key_scales(g));
      if (capped) x = tanh_accurate(x) * splat(softmax_.softcap * kLog2e);
      if (bias) x = fma(load(bias + start_ + g * kGroup), splat(kLog2e), x);
      store(s + g * kGroup, x);
    }
    return 1.0f;
  }

  // Values as tiles: where they lie, but for groups with positions that the tile does not see and whose
  // pages may hold NaN.
  void stage_values() {
    const int cells = width_ * 8;
    for (int g = first_; g < last_; ++g) {
      const int lo = maximum(unit_->tile.keys.lo - start_ - g * kGroup, 0) / 2;
      const int hi = minimum((unit_->tile.keys.hi - start_ - g * kGroup + 1) / 2, 8);
      uint32_t* room = values_ + g * cells;
      staged_[g] = (const uint8_t*)room;
      if (lo == 0 && hi == 8) {
        staged_[g] = (const uint8_t*)groups_[g].v;
      } else {
        __builtin_memset(room, 0, cells * sizeof *room);
        __builtin_memcpy(room + lo * width_, groups_[g].v + lo * width_, (hi - lo) * width_ * sizeof *room);
      }
    }
  }

  const uint8_t* value_group(int g) const {
    return Stored::scaled ? (const uint8_t*)value_room(g) : staged_[g];
  }

  template <int blocks, int columns>
  void values(int row, bool widens) {
    const int64_t row_bytes = kPartition * 2;
    const TileOperands o = {(const uint8_t*)p_ + row * row_bytes, 16 * row_bytes, kGroup * 2, row_bytes,
                            width_ * (int64_t)sizeof(uint32_t), 16 * width_, width_ * (int64_t)sizeof(float)};
    const int width = width_;
    for (int i = 0; i < width; i += 16 * columns) {
      int features[columns];
      float* out[columns];
      for (int j = 0; j < columns; ++j) {  // behind the last: those again
        features[j] = minimum(i + 16 * j, width_ - 16);
        out[j] = acc_ + row * width_ + features[j];
      }
      auto widen = [&](int g, int column) {
        if constexpr (Stored::scaled) {
          const int feature = i + 16 * column;
          if (widens && g < last_ && column % 2 == 0 && feature < width) {
            widen_values(groups_[g].v + kValueBytes * feature, width, value_room(g) + feature);
          }
        }
      };
      for (int j = 0; j < columns; ++j) widen(first_, j);
      multiply_tiles<blocks, columns, TILE_WEIGHT, TILE_VALUE>(
          o, first_, last_,
          [&](int g, int column) {
            if (blocks == 1 && alone_) fetch_values(later_[g], g < num_own_, features[column]);
            widen(g + 1, column);
            return value_group(g) + features[column] * 4;
          },
          out);
    }
  }

  const PagedAttention& a_;
  const VxStep& step_;
  PageMap<Stored> pages_;
  SoftmaxParameters softmax_;
  int width_, key_tiles_;
  const Unit* unit_ = nullptr;
  int blocks_ = 0, start_ = 0, first_ = 0, last_ = 0;
  bool alone_ = false;  // one block of rows: it waits for memory
  TileShapes shapes_;
  float *acc_, *scores_;      // (rows, Dp), (32, kScoreStride)
  uint32_t *q_, *p_;          // pairs of (rows, 32 key tiles), (rows, kPartition)
  uint32_t *keys_, *values_;  // rooms for groups
  Group groups_[kGroups], later_[kGroups], next_[kAhead];
  int num_next_ = 0;  // groups of the next unit that are known
  int num_own_ = 0;   // before it, what is fetched is of this unit
  const uint8_t* staged_[kGroups];
  RowState states_[kTileRows];
};

}  // namespace VX_ISA
}  // namespace vx
