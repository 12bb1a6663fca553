// Tiles of products with experts, as experts_order writes them.
//
// A slot is one of the k choices of a token: slot t * k + j is choice j of token t. Positions are slots in the order
// of their experts. A tile is some neighbouring positions of one expert: (expert, first position, count), count 0
// for tiles that are not used.
#pragma once
#include "vx.h"

struct ExpertTile {
  int expert, first, count;
};

VX_DEV ExpertTile tile_of(const int* tiles, int index) {
  const int* at = tiles + 3 * (size_t)index;
  return {at[0], at[1], at[2]};
}

// Where the row of x begins that position `first + i` reads: that of its token, whose slots are `share` rows, or with
// a null `order` the position's own.
struct RowOfSlot {
  const int* order;
  int first, share, width;
  VX_DEV size_t operator()(int i) const { return (size_t)(order ? order[first + i] / share : first + i) * width; }
};

// The same where there are no experts: the rows of x in their order.
struct OwnRow {
  int width;
  VX_DEV size_t operator()(int i) const { return (size_t)i * width; }
};
