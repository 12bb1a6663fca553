// How much memory `experts` needs.
#include "block_layout.h"
#include "experts.h"
#include "team.h"

// Of VxExperts::workspace for steps of at most `tokens` tokens.
VX_API size_t vx_experts_workspace_bytes(int32_t tokens, int32_t chosen, int32_t features, int32_t width,
                                         int32_t count, int32_t threads) {
  return vx::ExpertsRoom(tokens, chosen, features, width, count).bytes(threads);
}

// At most, of the packed activations of `rows` rows for matrices of a kind, however the rows are shared out.
// Those of quantised kinds take up to 3 bytes a column: quads of int16 and what else a unit has, or five rows
// that lie as eight (tile_panels.h).
VX_API size_t vx_panels_bytes(int32_t kind, int32_t cols, int32_t rows) {
  const int32_t bytes = kind < VX_Q4_0 || kind == VX_FLOAT8 ? 4 : 3;
  return (size_t)rows * ((size_t)(cols / 256 + 1) * 256 * bytes + 64);
}
