// VX: per instruction set
// y = x W^T for packed weights, with what follows it fused in: bias, gated activation, softcap.
//
// Weight layout: a tile is 32 output rows = two blocks of 16 rows; a block is [units][16 rows] of
// elements (bf16: [units][16][2], pairs of k; quantised: block_layout.h). Rows beyond N and the odd k
// beyond K hold zeros. A
// gated weight has gate rows in the first block of a tile and the matching up rows in the second.
//
// Activation layout: the M rows are cut into panels of at most MICRO_TOKENS tokens, each
// [units][tokens], so that the inner loop reads both operands from front to back. Few activations are
// packed by every thread for itself (no barrier); many are packed together.
//
// Threads draw chunks of tiles from a shared counter. A chunk's weights stay in the second-level
// cache while the panels pass by; with one panel (decode) they stream from memory once.
#include "kernels.h"

#include "activation.h"
#include "micro.h"

namespace vx {
namespace VX_ISA {

namespace {

enum {
  PRIVATE_PANEL_BYTES = 256 << 10,  // up to here each thread packs for itself
  CHUNK_BYTES = 256 << 10,          // of weights; half of a small second-level cache
  FETCH_AHEAD = 2048,               // bytes between a weight's prefetch and its use
};

struct Panels {
  const uint8_t* base;
  int32_t rows, count, units;

  int32_t begin(int32_t panel) const { return (int32_t)((int64_t)rows * panel / count); }
};

VX_INLINE const float* activation_row(const VxLinear* a, const VxStep* step, int32_t row) {
  return a->x + (size_t)(a->logit_rows ? step->logit_rows[row] : row) * (size_t)a->w.cols;
}

// One token's activations into its column of a panel of `tokens` columns.
template <class Kind>
static void pack_row(const float* x, int32_t cols, int32_t tokens, uint8_t* out) {
  const size_t stride = (size_t)tokens * Kind::PANEL_BYTES;
  if constexpr (Kind::INT8) {
    for (int32_t k = 0; k < cols; k += Kind::UNIT_COLS, out += stride) Kind::quantise_unit(x + k, out);
  } else {
    for (int32_t k = 0; k < cols; k += 16) {
      const int32_t left = cols - k < 16 ? cols - k : 16;
      const F32x16 v = left == 16 ? load(x + k) : load_n(x + k, left);
      float lanes[16];
      if (Kind::PANEL_BYTES * Kind::UNIT_COLS == 8)  // pairs of bf16 in one word
        store_bf16((uint16_t*)lanes, v);
      else
        store(lanes, v);
      const int32_t units = (left + Kind::UNIT_COLS - 1) / Kind::UNIT_COLS;
      for (int32_t u = 0; u < units; ++u, out += stride)
        __builtin_memcpy(out, (const uint8_t*)lanes + u * Kind::PANEL_BYTES, Kind::PANEL_BYTES);
    }
  }
}

template <class Kind>
static void pack_panel(const VxLinear* a, const VxStep* step, Panels p, int32_t panel, uint8_t* base) {
  const int32_t begin = p.begin(panel), tokens = p.begin(panel + 1) - begin;
  uint8_t* out = base + (size_t)begin * p.units * Kind::PANEL_BYTES;
  for (int32_t t = 0; t < tokens; ++t)
    pack_row<Kind>(activation_row(a, step, begin + t), a->w.cols, tokens, out + t * Kind::PANEL_BYTES);
}

template <class Kind>
static Panels pack(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  Panels p;
  p.rows = rows;
  p.count = (rows + MICRO_TOKENS - 1) / MICRO_TOKENS;
  p.units = (a->w.cols + Kind::UNIT_COLS - 1) / Kind::UNIT_COLS;
  const size_t bytes = (size_t)rows * p.units * Kind::PANEL_BYTES;
  const bool alone = bytes <= PRIVATE_PANEL_BYTES && bytes <= ctx->scratch_bytes;
  p.base = alone ? ctx->scratch : (const uint8_t*)a->panels;
  if (alone) {
    for (int32_t i = 0; i < p.count; ++i) pack_panel<Kind>(a, step, p, i, ctx->scratch);
  } else {
    for (int32_t i; (i = vx_next(ctx)) < p.count;)
      pack_panel<Kind>(a, step, p, i, (uint8_t*)a->panels);
    vx_barrier(ctx);
  }
  return p;
}

// Bias, activation or softcap, and the store, of one tile's sums c: [tokens][32].
VX_INLINE void finish_tile(const VxLinear* a, int32_t tile, int32_t row, int32_t tokens, const float* c) {
  const VxWeight* w = &a->w;
  const int32_t features = w->rows / 2;
  const size_t stride = (size_t)(a->stride ? a->stride : a->activation != VX_NONE ? features : w->rows);
  F32x16 bias[2] = {zero(), zero()};
  if (w->bias)
    for (int h = 0; h < 2; ++h) bias[h] = load(w->bias + (size_t)tile * 32 + h * 16);
  for (int32_t t = 0; t < tokens; ++t) {
    F32x16 sums[2] = {load(c + t * 32) + bias[0], load(c + t * 32 + 16) + bias[1]};
    if (a->activation != VX_NONE) {
      const int32_t left = features - tile * 16;
      float* y = a->y + (size_t)(row + t) * stride + tile * 16;
      store_n(y, activate(sums[0], a->activation) * sums[1], left < 16 ? left : 16);
      continue;
    }
    for (int h = 0; h < 2; ++h) {
      const int32_t column = w->gated ? h * features + tile * 16 : tile * 32 + h * 16;
      const int32_t left = (w->gated ? (h + 1) * features : w->rows) - column;
      if (left <= 0) continue;
      if (a->softcap != 0.0f)
        sums[h] = splat(a->softcap) * tanh(sums[h] / splat(a->softcap));
      store_n(a->y + (size_t)(row + t) * stride + column, sums[h], left < 16 ? left : 16);
    }
  }
}

template <class Kind>
static void multiply(const VxLinear* a, Panels p, VxCtx* ctx) {
  const VxWeight* w = &a->w;
  const size_t block_bytes = (size_t)p.units * Kind::UNIT_BYTES, tile_bytes = 2 * block_bytes;
  int32_t chunk = (int32_t)(CHUNK_BYTES / tile_bytes);
  const int32_t fair = w->tiles / (ctx->nth * 8);  // enough chunks for everybody
  if (chunk > fair) chunk = fair;
  if (chunk < 1) chunk = 1;
  alignas(64) float c[MICRO_TOKENS * 32];
  for (int32_t first; (first = vx_next(ctx) * chunk) < w->tiles;) {
    const int32_t last = first + chunk < w->tiles ? first + chunk : w->tiles;
    for (int32_t panel = 0; panel < p.count; ++panel) {
      const int32_t row = p.begin(panel), tokens = p.begin(panel + 1) - row;
      const uint8_t* x = p.base + (size_t)row * p.units * Kind::PANEL_BYTES;
      const Micro run = micro_for<Kind>(tokens);
      for (int32_t tile = first; tile < last; ++tile) {
        const uint8_t* data = (const uint8_t*)w->data + (size_t)tile * tile_bytes;
        for (int b = 0; b < 2; b += MICRO_BLOCKS) {
          const uint8_t* block = data + (size_t)b * block_bytes;
          run(block, block_bytes, p.units, x, c + b * 16, panel == 0 ? block + FETCH_AHEAD : nullptr);
        }
        finish_tile(a, tile, row, tokens, c);
      }
    }
  }
}

template <class Kind>
static void run_linear(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  multiply<Kind>(a, pack<Kind>(a, step, rows, ctx), ctx);
}

}  // namespace

void linear(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxLinear* a = (const VxLinear*)args;
  const int32_t rows = a->logit_rows ? step->L : step->T;
  if (rows == 0) return;
  switch (a->w.kind) {
    case VX_F32: return run_linear<WeightF32>(a, step, rows, ctx);
    case VX_F16: return run_linear<WeightF16>(a, step, rows, ctx);
    case VX_BF16: return run_linear<WeightBf16>(a, step, rows, ctx);
  }
  layout::visit_format(a->w.kind, 0, [=](auto format) {
    run_linear<BlockKind<decltype(format)>>(a, step, rows, ctx);
    return 0;
  });
}

}  // namespace VX_ISA
}  // namespace vx
