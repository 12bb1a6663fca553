// Paged attention of one layer: q/k norm, RoPE, K/V write, then softmax(q k^T) v over the pages.
//
// Pages. P (block_size) is a multiple of 16, D (head_size) even. A page holds, for each kv head, P / 16
// *groups* of 16 consecutive positions, so that one vector covers one feature of a group:
//   bf16:  K group [D / 2][16 positions][2 features]    V group [8][Dp][2 positions]
//   f32, f16:  K group [D][16 positions]                V group [16 positions][Dp]
//   int8, fp8, q4: codes and scales, attention_codes.h
// with Dp = D rounded up to 16. Block b, kv head k, group g start at ((b * K + k) * P / 16 + g) groups.
// Pages need no initial value: what no visible position wrote never reaches a result.
//
// Phases. K and V of all tokens are written before the first is read. In a step of decode rows alone each
// unit writes its own token first: nobody else needs it, its group is on the way into the cache anyway,
// and units over short contexts follow each other without a barrier, the pages of the next one being
// fetched meanwhile. At a context of 40 tokens a unit is 22 KiB to read and little to compute: what it
// can reach is the speed of memory.
//
// Bits. Positions are worked off in partitions of 256, aligned to position 0. A partition has a softmax
// of its own and is folded into the total in order, so a token's output is a function of its q and the
// visible K/V alone: not of the tile of queries that it was computed in, nor of which thread took which
// partition, nor of the block numbers.
//
// bf16 pages multiply bf16 by bf16 (q and the probabilities are rounded) and add in float32; f32 and
// f16 pages compute in float32; codes are multiplied as bf16. A window means:
// causal, positions p - window + 1 ... p; not causal, p - window + 1 ... p + window - 1.
// With spans a token sees up to `visible_to`, which does not fall from one token of a row to the next.
#pragma once
#include "images.h"

#pragma GCC visibility push(default)
extern "C" {
// Bytes of one block in k_pages (in v_pages) for all kv heads.
size_t vx_k_page_bytes(int32_t num_kv_heads, int32_t head_size, int32_t block_size, int32_t kv_dtype);
size_t vx_v_page_bytes(int32_t num_kv_heads, int32_t head_size, int32_t block_size, int32_t kv_dtype);
// Bytes of VxAttention::workspace with which contexts of up to max_context tokens use all threads.
size_t vx_attention_workspace_bytes(int32_t num_heads, int32_t num_kv_heads, int32_t head_size,
                                    int32_t max_context, int32_t nth);
}
#pragma GCC visibility pop

// Attention in which the tokens of an image see each other both ways.
struct VxSpanAttention {
  VxAttention attention;
  const VxImages* images;
};

namespace vx {
// What a layer computes: its arguments, and beside them what the step lets each token see.
struct PagedAttention : VxAttention {
  const int32_t* seen;  // (T) last position that a causal layer's token sees, or null: its own
  int32_t piece = 0, pieces = 1;  // shares piece, piece + pieces, ... alone; the first piece writes K and V
};

namespace VX_ISA {
// One layer over a step whose slots and block table are those of its pages.
void attend_step(const PagedAttention& a, const VxStep& step, VxCtx* ctx);
// args: VxAttention.
void attention(const void* args, const VxStep* step, VxCtx* ctx);
// args: VxSpanAttention.
void span_attention(const void* args, const VxStep* step, VxCtx* ctx);
}  // namespace VX_ISA
}  // namespace vx
