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
  typedef TilePartition<Bf16Pages> Partition;
};
template <class Keys, class Values>
struct Computing<CodePages<Keys, Values>> {
  typedef TilePartition<CodePages<Keys, Values>> Partition;
};
#endif

// Units over more partitions than these are not taken before their time: who loses its core holds them up.
constexpr int kExpectedPartitions = 4;

// The shares of the step. With `writes` each unit first writes its own token (see decodes_whole).
template <class Pages>
void attend(const PagedAttention& a, const VxStep& step, VxCtx* ctx, bool writes) {
  Worker<typename Computing<Pages>::Partition> worker(a, step, HeadEnds(a, step), ctx->scratch);
  PageMap<Pages> pages(a);
  Shares shares(a, step, ctx->nth);
  const size_t state_floats = shares.cutter.state_floats();
  const auto draw = [&](Share* share) { return shares.find(vx_next(ctx) * a.pieces + a.piece, share); };
  Share now, next = {};
  for (bool more = draw(&now); more; now = next) {
    const bool ahead = writes && partitions(now.tile) <= kExpectedPartitions;
    if (ahead) more = draw(&next);
    if (writes) write_token<Pages>(a, step, pages, now.tile.token, now.heads.kv_head);
    worker.begin(now.tile, now.heads);
    worker.expect(ahead && more ? &next : nullptr);
    run_share(a, now, state_floats, &worker);
    if (!ahead) more = draw(&next);
  }
  if (!shares.cutter.any()) return;
  vx_barrier(ctx);
  combine(a, step, ctx, &worker);
}

template <class Pages>
void run(const PagedAttention& a, const VxStep& step, VxCtx* ctx) {
  const bool alone = !a.shared && a.pieces == 1 && decodes_whole(a, step, ctx->nth);
  if (!alone && !a.shared && a.piece == 0) {
    write_kv<Pages>(a, step, ctx);
    vx_barrier(ctx);
  }
  attend<Pages>(a, step, ctx, alone);
}

// The step as a layer of this cache group sees it: its slots and its block table come first.
VxStep step_of_group(VxStep step, int group) {
  step.slots += (size_t)group * step.T;
  step.block_tables += (size_t)group * step.R * step.block_stride;
  return step;
}

}  // namespace

void attend_step(const PagedAttention& a, const VxStep& step, VxCtx* ctx) {
  switch (a.kv_dtype) {
    case VX_BF16: return run<Bf16Pages>(a, step, ctx);
    case VX_F16: return run<F16Pages>(a, step, ctx);
    case VX_KV_INT8: return run<CodePages<Int8Code>>(a, step, ctx);
    case VX_KV_FP8: return run<CodePages<Fp8Code>>(a, step, ctx);
    case VX_KV_Q4: return run<CodePages<Q4Code>>(a, step, ctx);
    case VX_KV_INT8_Q4: return run<CodePages<Int8Code, Q4Code>>(a, step, ctx);
    default: return run<F32Pages>(a, step, ctx);
  }
}

void attention(const void* args, const VxStep* all_groups, VxCtx* ctx) {
  const VxAttention& a = *(const VxAttention*)args;
  attend_step({a, nullptr}, step_of_group(*all_groups, a.group), ctx);
}
VX_OP(attention, VxAttention)

void span_attention(const void* args, const VxStep* all_groups, VxCtx* ctx) {
  const VxSpanAttention& spans = *(const VxSpanAttention*)args;
  attend_step({spans.attention, spans.images->visible_to}, step_of_group(*all_groups, spans.attention.group), ctx);
}
VX_OP(span_attention, VxSpanAttention)

}  // namespace VX_ISA
}  // namespace vx
