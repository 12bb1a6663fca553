// One matrix times the rows of activations that it is for: what `linear` is once, and `experts` twice for
// each expert that was chosen. A Kernel knows how a kind of weights multiplies so many rows; products.h has
// the loops around it, which are the same for all.
//
// Weight layout: a tile is 32 output rows = two blocks of 16 rows; a block is [units][16 rows] of
// elements (bf16: [units][16][2], pairs of k; quantised: block_layout.h). Rows beyond N and the odd k
// beyond K hold zeros. A gated weight has gate rows in the first block of a tile and the matching up
// rows in the second.
#pragma once
#include "ops.h"

namespace vx {
namespace VX_ISA {

// What follows the sums and the bias.
struct Finish {
  int32_t activation;  // VxActivation: act(gate) * up of a gated weight, act(y) of any other; or VX_NONE
  float softcap;       // 0 = none
  float clamp, alpha;  // 0 = none; of a gated weight: VxExperts
};

struct Product {
  VxWeight w;
  Finish finish;
  const float* x;        // (any, K)
  const int32_t* picks;  // row r of the product is row picks[r] of x; null: row r
  int32_t rows;
  float* y;              // (rows, N), or (rows, F) of a gated weight with an activation
  int32_t stride;        // from a row of y to the next

  const float* row(int32_t r) const { return x + (size_t)(picks ? picks[r] : r) * (size_t)w.features; }
};

// Activations as a kernel reads them: `count` panels of `size` rows, the last one of fewer, each a row of
// units of columns.
struct Panels {
  uint8_t* base;
  int32_t rows, units, count, size;
  size_t bytes;

  int32_t begin(int32_t panel) const { return panel < count ? panel * size : rows; }
};

// Output tiles of a product, the weights that come after them in this thread (null for none), and the
// panels that pass by.
struct TileRange {
  int32_t begin, end;
  const uint8_t* then;
  int32_t first_panel, end_panel;
};

// What a thread takes of a matrix at a time: at most so many bytes, and few enough for so many shares of each
// thread. Such a chunk stays in the second-level cache while the panels pass by; what one panel passes by
// streams from memory once. A kernel may have so many panels pass by at a time, and the next ones drawn
// apart: where there are more, its chunks are of `group_bytes`. 0: it does not.
struct Chunks {
  int32_t bytes, shares, group_panels = 0, group_bytes = 0;

  bool groups(int32_t panels) const { return group_panels > 0 && panels > group_panels; }
};
enum { CHUNK_BYTES = 256 << 10, ONCE_BYTES = 64 << 10 };

// How a kind of weights multiplies so many rows. The panels of a product lie at a multiple of 64 bytes.
struct Kernel {
  Chunks once, again;    // with one panel, with several
  size_t private_bytes;  // up to here every thread packs all panels for itself rather than wait for the others
  int32_t parts;         // of a panel, which threads may pack apart
  Panels (*shape)(const Product& a);
  void (*pack)(const Product& a, const Panels& p, int32_t panel, int32_t part, int32_t parts);
  void (*multiply)(const Product& a, const Panels& p, TileRange tiles, uint8_t* scratch);
};

// The families of kinds (block_layout.h), each in a source of its own: together they would compile for
// minutes. Null for a kind of another family.
const Kernel* dense_kernel(int32_t kind);
const Kernel* scaled_kernel(int32_t kind, int32_t rows);
const Kernel* super_kernel(int32_t kind, int32_t rows);
const Kernel* affine_kernel(int32_t kind, int32_t rows);
const Kernel* float8_kernel(int32_t kind, int32_t rows);

// Stores one tile's sums c, [tokens][32], of the rows from `row` on.
void finish_tile(const Product& a, int32_t tile, int32_t row, int32_t tokens, const float* c);

}  // namespace VX_ISA
}  // namespace vx
