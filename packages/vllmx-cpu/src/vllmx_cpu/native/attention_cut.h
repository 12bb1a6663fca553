// How a step of attention is cut into work: tiles, units, pieces.
//
// A tile is a run of query tokens of one row; a unit is a tile with the query heads of one kv head (at
// most kTileRows rows of queries). A decode row over a long context is one unit that would keep one
// thread busy: it is cut into pieces of a few partitions, whose states go to the shared workspace and
// are folded after a barrier, in the order in which an uncut unit folds them.
#pragma once
#include "attention.h"
#include "attention_tile.h"

namespace vx {
namespace VX_ISA {

constexpr int kTileRows = 64;
constexpr int kSplitRows = 16;  // units of more rows are never cut: their states would be large

VX_INLINE int minimum(int a, int b) { return a < b ? a : b; }
VX_INLINE int maximum(int a, int b) { return a > b ? a : b; }
VX_INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Tile {
  int row, token, tokens;
  Visible keys;  // seen by any of its tokens
};

// The query heads first ... first + count - 1, all of one kv head.
struct Heads {
  int kv_head, first, count;
};

// A tile with query heads of one kv head. Row r of its queries is token r / heads.count of the tile,
// head heads.first + r % heads.count.
struct Unit {
  Tile tile;
  Heads heads;
  int rows;
  Visible visible[kTileRows];  // by each row
};

// What is added to the scores of row r of a unit, by position; null: nothing.
VX_INLINE const float* bias_of(const PagedAttention& a, const VxStep& step, const Unit& unit, int r) {
  if (!a.bias) return nullptr;
  const int head = unit.heads.first + r % unit.heads.count;
  const int position = step.positions[unit.tile.token + r / unit.heads.count];
  return a.bias + (size_t)head * (2 * a.bias_length - 1) + (a.bias_length - 1 - position);
}

// How units of a tile are cut into pieces, and where the states of a cut one go.
struct Cut {
  int pieces;              // 1 = not cut
  int piece_partitions;
  size_t workspace_state;  // first state of the tile in the workspace
};

VX_INLINE Visible visible_to(const PagedAttention& a, const VxStep& step, int row, int token) {
  int position = step.positions[token], context = step.context_len[row];
  Visible v = {0, a.causal ? (a.seen ? a.seen[token] : position) + 1 : context};
  if (a.window > 0) {
    v.lo = maximum(0, position - a.window + 1);
    if (!a.causal) v.hi = minimum(context, position + a.window);
  } else if (a.window < 0) {
    v.lo = position - position % -a.window;
  }
  return v;
}

VX_INLINE int first_partition(const Tile& tile) { return tile.keys.lo / kPartition; }
VX_INLINE int partitions(const Tile& tile) { return ceil_div(tile.keys.hi, kPartition) - first_partition(tile); }
VX_INLINE int first_group(const Tile& tile) { return tile.keys.lo / kGroup; }
VX_INLINE int last_group(const Tile& tile) { return (tile.keys.hi - 1) / kGroup; }

// Walks the tiles of a step in order; all threads see the same.
class Tiling {
 public:
  Tiling(const PagedAttention& a, const VxStep& step) : a_(a), step_(step) {
    group_heads_ = a.num_heads / a.num_kv_heads;
    heads = minimum(group_heads_, kTileRows);
    head_blocks = ceil_div(group_heads_, heads);
    tile_tokens_ = kTileRows / heads;
  }

  bool next(Tile* tile) {
    while (row_ < step_.R && token_ >= step_.query_start[row_ + 1]) ++row_;
    if (row_ >= step_.R) return false;
    int tokens = minimum(tile_tokens_, step_.query_start[row_ + 1] - token_);
    *tile = {row_, token_, tokens,
             {visible_to(a_, step_, row_, token_).lo, visible_to(a_, step_, row_, token_ + tokens - 1).hi}};
    token_ += tokens;
    return true;
  }

  int units() const { return a_.num_kv_heads * head_blocks; }
  Heads unit_heads(int unit) const {
    int kv_head = unit / head_blocks, inside = unit % head_blocks * heads;
    return {kv_head, kv_head * group_heads_ + inside, minimum(heads, group_heads_ - inside)};
  }
  // That a unit which is cut leaves in the workspace.
  size_t unit_states(const Tile& tile) const { return (size_t)partitions(tile) * tile.tokens * heads; }
  int heads;        // query heads of a unit (the last block of a kv head may have fewer)
  int head_blocks;  // units of a kv head

 private:
  const PagedAttention& a_;
  const VxStep& step_;
  int tile_tokens_, group_heads_;
  int row_ = 0, token_ = 0;
};

// Decides on the cuts, the same on all threads. Costs are in cycles, roughly.
class Cutter {
 public:
  Cutter(const PagedAttention& a, const VxStep& step, int nth) : tiling_(a, step), nth_(nth) {
    state_floats_ = padded(a.head_size) + 16;
    capacity_ = a.workspace ? a.workspace_bytes / (state_floats_ * sizeof(float)) : 0;
    if (nth == 1) return;
    Tiling tiles(a, step);
    for (Tile tile; tiles.next(&tile);) total_ += cost(tile) * tiles.units();
  }

  Cut cut(const Tile& tile) {
    Cut whole = {1, partitions(tile), 0};
    int rows = tile.tokens * tiling_.heads;
    if (nth_ == 1 || (rows > kSplitRows && tile.tokens > 1)) return whole;
    double fair = total_ / (4 * nth_);
    if (cost(tile) < 2 * fair || partitions(tile) < 2) return whole;
    int each = maximum(1, (int)(fair / (cost(tile) / partitions(tile))));
    size_t states = tiling_.units() * tiling_.unit_states(tile);
    if (used_ + states > capacity_) return whole;
    Cut result = {ceil_div(partitions(tile), each), each, used_};
    used_ += states;
    return result;
  }

  bool any() const { return used_ > 0; }
  size_t state_floats() const { return state_floats_; }

 private:
  double cost(const Tile& tile) const {
    return (tile.keys.hi - tile.keys.lo + 16.0) * (64.0 + 10.0 * tile.tokens * tiling_.heads);
  }
  Tiling tiling_;
  int nth_;
  double total_ = 0;
  size_t state_floats_, capacity_, used_ = 0;
};

// What one draw of the shared counter stands for.
struct Share {
  Tile tile;
  Cut cut;
  Heads heads;
  int piece;
  size_t first_state;  // of its unit, where that is cut
};

// Turns the numbers of the shared counter into shares, the same on all threads.
class Shares {
 public:
  Shares(const PagedAttention& a, const VxStep& step, int nth) : cutter(a, step, nth), tiling_(a, step) {}

  // Share `number`, which grows from call to call. False behind the last one: every tile has been cut.
  bool find(int number, Share* share) {
    while (number >= end_) {
      if (!tiling_.next(&tile_)) return false;
      cut_ = cutter.cut(tile_);
      begin_ = end_;
      end_ += tiling_.units() * cut_.pieces;
    }
    int unit = (number - begin_) / cut_.pieces, piece = (number - begin_) % cut_.pieces;
    *share = {tile_, cut_, tiling_.unit_heads(unit), piece, cut_.workspace_state + unit * tiling_.unit_states(tile_)};
    return true;
  }

  Cutter cutter;

 private:
  Tiling tiling_;
  Tile tile_ = {};
  Cut cut_ = {};
  int begin_ = 0, end_ = 0;  // shares of the current tile
};

// Is every row one token, and every unit a kv head of one, uncut? Then nobody but its unit needs what
// a token's kv head writes.
VX_INLINE bool decodes_whole(const PagedAttention& a, const VxStep& step, int nth) {
  Tiling tiling(a, step);
  if (step.T != step.R || tiling.head_blocks > 1) return false;
  Cutter cutter(a, step, nth);
  for (Tile tile; tiling.next(&tile);) {
    if (step.query_start[tile.row + 1] - step.query_start[tile.row] != 1) return false;
    if (cutter.cut(tile).pieces > 1) return false;
  }
  return true;
}

}  // namespace VX_ISA
}  // namespace vx
