// K/V of this step's tokens into their pages: the first phase of attention, or of a decode row's unit.
//
// Writing is in whole vectors wherever the layout allows it: a V row of bf16 pages holds two positions
// side by side, so the token at the even one writes for both when its successor belongs to this step,
// and zeroes the odd half when not (a stale NaN there would survive its probability of 0).
#pragma once
#include "attention_codes.h"
#include "attention_heads.h"

namespace vx {
namespace VX_ISA {

// k: D prepared floats, scattered over the group's vectors.
VX_INLINE void write_k(F32Pages, float* group, int lane, const float* k, int head_size) {
  for (int i = 0; i < head_size; ++i) group[i * kGroup + lane] = k[i];
}
VX_INLINE void write_k(F16Pages, uint16_t* group, int lane, const float* k, int head_size) {
  uint16_t halves[kMaxHeadSize];
  for (int i = 0; i < head_size; i += 16) store_f16(halves + i, load(k + i));
  for (int i = 0; i < head_size; ++i) group[i * kGroup + lane] = halves[i];
}
VX_INLINE void write_k(Bf16Pages, uint32_t* group, int lane, const float* k, int head_size) {
  uint32_t cells[kMaxHeadSize / 2];
  for (int i = 0; i < head_size; i += 16) store_bf16((uint16_t*)cells + i, load(k + i));
  for (int i = 0; i < head_size / 2; ++i) group[i * kGroup + lane] = cells[i];
}

template <class Code, class Values>
VX_INLINE void write_k(CodePages<Code, Values>, uint8_t* group, int lane, const float* k, int head_size) {
  uint8_t codes[kMaxHeadSize];
  const float scale = quantise_head<Code>(k, padded(head_size), codes);
  if constexpr (Code::per_byte == 2) {
    for (int i = 0; i < head_size / 2; ++i) group[i * kGroup + lane] = codes[2 * i] | codes[2 * i + 1] << 4;
  } else if constexpr (Code::interleaved) {
    for (int i = 0; i < head_size; i += 2) __builtin_memcpy(group + i * kGroup + 2 * lane, codes + i, 2);
  } else {
    for (int i = 0; i < head_size; ++i) group[i * kGroup + lane] = codes[i];
  }
  __builtin_memcpy(group + head_size * kGroup / Code::per_byte + lane * sizeof scale, &scale, sizeof scale);
}

// Is token t followed (preceded) in this step by the other position of its pair?
VX_INLINE bool pair_follows(const VxStep& step, int t) {
  return t + 1 < step.T && step.slots[t + 1] == step.slots[t] + 1;
}
VX_INLINE bool pair_precedes(const VxStep& step, int t) {
  return t > 0 && step.slots[t - 1] == step.slots[t] - 1;
}

// v: D floats in place in qkv; the next token's lie `stride` further.
VX_INLINE void write_v(F32Pages, const VxStep&, int, float* group, int lane, const float* v, size_t,
                       int head_size) {
  float* row = group + (size_t)lane * padded(head_size);
  for (int i = 0; i < head_size; i += 16) {
    store(row + i, load_n(v + i, head_size - i < 16 ? head_size - i : 16));
  }
}
VX_INLINE void write_v(F16Pages, const VxStep&, int, uint16_t* group, int lane, const float* v, size_t,
                       int head_size) {
  uint16_t* row = group + (size_t)lane * padded(head_size);
  for (int i = 0; i < head_size; i += 16) {
    store_f16(row + i, load_n(v + i, head_size - i < 16 ? head_size - i : 16));
  }
}
VX_INLINE void write_v(Bf16Pages, const VxStep& step, int t, uint32_t* group, int lane, const float* v,
                       size_t stride, int head_size) {
  uint32_t* row = group + (size_t)(lane / 2) * padded(head_size);
  bool odd = lane & 1;
  if (odd && pair_precedes(step, t)) return;
  bool both = !odd && pair_follows(step, t);
  for (int i = 0; i < head_size; i += 16) {
    int n = head_size - i < 16 ? head_size - i : 16;
    U32x16 own = bf16_bits(load_n(v + i, n));
    U32x16 cells;
    if (odd) {
      cells = (load_u32(row + i) & splat_u32(0xffff)) | (own << 16);
    } else {
      cells = both ? own | (bf16_bits(load_n(v + stride + i, n)) << 16) : own;
    }
    store_u32(row + i, cells);
  }
}

template <class Keys, class Code>
VX_INLINE void write_v(CodePages<Keys, Code>, const VxStep&, int, uint8_t* group, int lane, const float* v, size_t,
                       int head_size) {
  const int width = padded(head_size);
  float wide[kMaxHeadSize];
  uint8_t codes[kMaxHeadSize];
  for (int i = 0; i < head_size; i += 16) {
    store(wide + i, load_n(v + i, head_size - i < 16 ? head_size - i : 16));
  }
  if constexpr (Code::per_byte == 2) turn_head(wide, head_size);
  const float scale = quantise_head<Code>(wide, width, codes);
  uint8_t* out = group + lane / 2 * kCodeBytes<Code> * width + lane % 2 * (Code::interleaved ? 1 : 16 / Code::per_byte);
  for (int i = 0; i < width; i += 16, out += 16 * kCodeBytes<Code>) {
    if constexpr (Code::per_byte == 2) {
      for (int j = 0; j < 8; ++j) out[j] = codes[i + j] | codes[i + j + 8] << 4;
    } else if constexpr (Code::interleaved) {
      Code::store_every_second(codes + i, out);
    } else {
      __builtin_memcpy(out, codes + i, 16);
    }
  }
  __builtin_memcpy(group + kGroup * width / Code::per_byte + lane * sizeof scale, &scale, sizeof scale);
}

// One kv head of one token.
template <class Pages>
__attribute__((noinline)) void write_token(const VxAttention& a, const VxStep& step, const PageMap<Pages>& pages, int t,
                           int kv_head) {
  size_t stride = token_stride(a);
  const float* k = a.qkv + t * stride + (size_t)(a.num_heads + kv_head) * a.head_size;
  const float* v = k + (size_t)a.num_kv_heads * a.head_size;
  if (t + 2 < step.T) {
    prefetch_head(k + 2 * stride, a.head_size);
    prefetch_head(v + 2 * stride, a.head_size);
  }
  int slot = step.slots[t], block = slot / a.block_size, offset = slot % a.block_size;
  int group = offset / kGroup, lane = offset % kGroup;
  float prepared[kMaxHeadSize];
  prepare_head(a, k, a.k_norm, rope_row(a, step, t), prepared);
  write_k(Pages(), pages.k_group(block, kv_head, group), lane, prepared, a.head_size);
  write_v(Pages(), step, t, pages.v_group(block, kv_head, group), lane, v, stride, a.head_size);
}

// All tokens of the step; a share is a few tokens of one kv head.
template <class Pages>
void write_kv(const VxAttention& a, const VxStep& step, VxCtx* ctx) {
  PageMap<Pages> pages(a);
  int share = step.T >= 16 * ctx->nth ? 8 : 1;
  int blocks = (step.T + share - 1) / share;
  for (int32_t i; (i = vx_next(ctx)) < blocks * a.num_kv_heads;) {
    int kv_head = i % a.num_kv_heads, first = i / a.num_kv_heads * share;
    int last = first + share < step.T ? first + share : step.T;
    for (int t = first; t < last; ++t) write_token<Pages>(a, step, pages, t, kv_head);
  }
}

}  // namespace VX_ISA
}  // namespace vx
