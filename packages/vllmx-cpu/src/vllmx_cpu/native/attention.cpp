// VX: per instruction set
// The attention op: K/V into the pages, then the units of the step, shared among the threads.
#include "attention.h"

#include "attention_unit.h"
#include "attention_vectors.h"
#include "attention_write.h"
#if defined(__AMX_BF16__)
#include "tile_attention.h"
#endif

namespace vx {
namespace VX_ISA {
namespace {

// What computes with these pages.
template <class Pages>
struct Computing {
  typedef VectorPartition<Pages> Partition;
};
#if defined(__AMX_BF16__)
template <>
struct Computing<Bf16Pages> {
  typedef TilePartition Partition;
};
#endif

// A unit's kv head and query heads.
template <class Worker>
void begin_unit(const VxAttention& a, const Tiling& tiling, const Tile& tile, int unit, Worker* worker) {
  int group_heads = a.num_heads / a.num_kv_heads;
  int kv_head = unit / tiling.head_blocks, inside = unit % tiling.head_blocks * tiling.heads;
  worker->begin(tile, kv_head, kv_head * group_heads + inside, minimum(tiling.heads, group_heads - inside));
}

template <class Pages>
void attend(const VxAttention& a, const VxStep& step, VxCtx* ctx) {
  Worker<typename Computing<Pages>::Partition> worker(a, step, ctx->scratch);
  Tiling tiling(a, step);
  Cutter cutter(a, step, ctx->nth);
  float* workspace = (float*)a.workspace;
  size_t unit_floats = 0;
  Tile tile;
  Cut cut = {};
  int end = 0, begin = 0;  // shares of the current tile
  for (int32_t i; (i = vx_next(ctx)) >= 0;) {
    while (i >= end && tiling.next(&tile)) {
      cut = cutter.cut(tile);
      begin = end;
      end += tiling.units() * cut.pieces;
      unit_floats = (size_t)partitions(tile) * tile.tokens * tiling.heads * cutter.state_floats();
    }
    if (i >= end) break;
    int unit = (i - begin) / cut.pieces, piece = (i - begin) % cut.pieces;
    begin_unit(a, tiling, tile, unit, &worker);
    if (cut.pieces == 1) {
      worker.run_whole();
    } else {
      int from = piece * cut.piece_partitions, to = minimum(from + cut.piece_partitions, partitions(tile));
      float* states = workspace + cut.workspace_state * cutter.state_floats() + unit * unit_floats;
      worker.run_piece(from, to, states, cutter.state_floats());
    }
  }
  if (!cutter.any()) return;
  vx_barrier(ctx);
  Tiling again(a, step);
  Cutter same(a, step, ctx->nth);
  int base = 0, taken = vx_next(ctx);
  while (again.next(&tile)) {
    cut = same.cut(tile);
    if (cut.pieces == 1) continue;
    unit_floats = (size_t)partitions(tile) * tile.tokens * again.heads * same.state_floats();
    for (; taken < base + again.units(); taken = vx_next(ctx)) {
      int unit = taken - base;
      begin_unit(a, again, tile, unit, &worker);
      worker.combine(workspace + cut.workspace_state * same.state_floats() + unit * unit_floats, same.state_floats());
    }
    base += again.units();
  }
}

template <class Pages>
void run(const VxAttention& a, const VxStep& step, VxCtx* ctx) {
  write_kv<Pages>(a, step, ctx);
  vx_barrier(ctx);
  attend<Pages>(a, step, ctx);
}

}  // namespace

void attention(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxAttention& a = *(const VxAttention*)args;
  switch (a.kv_dtype) {
    case VX_BF16: return run<Bf16Pages>(a, *step, ctx);
    case VX_F16: return run<F16Pages>(a, *step, ctx);
    case VX_KV_INT8: return run<CodePages<Int8Code>>(a, *step, ctx);
    case VX_KV_FP8: return run<CodePages<Fp8Code>>(a, *step, ctx);
    default: return run<F32Pages>(a, *step, ctx);
  }
}

}  // namespace VX_ISA
}  // namespace vx
