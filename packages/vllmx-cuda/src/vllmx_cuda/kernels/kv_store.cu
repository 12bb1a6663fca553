// What stands between the QKV projection and attention, in one pass: splits qkv into heads,
// normalises and rotates the query and key heads, writes queries densely and keys and values into
// their pages.
//
// Layout: qkv (T, H + 2K, D) of elem; q_norm, k_norm (D) of f32 or null; rope (positions,
//         rotary_dim) of f32, cos then sin of each position, or null; q (T, H, D) of elem;
//         k_pages, v_pages (blocks, K, P, D) of VX_KV with P = 2^page_shift, so that the tokens of a
//         page that one head reads are neighbours; slots (T): block * P + offset, negative: the
//         token is padding and nothing is stored. K is 0 where a layer reads another one's pages.
// Grid:   (T, ceil((H + 2K) / 4)), a warp a head. A head passes through shared memory once, where
//         every rotation, half-split, interleaved or partial, is two reads.
//         eps below 0: norms follow the rotation.
// Floor:  bytes: qkv read once, the same written once.
#include "vx.h"

#ifndef VX_HEAD
#define VX_HEAD 128
#endif
#include "head_store.h"
#define WARPS 4

extern "C" __global__ void __launch_bounds__(32 * WARPS)
kv_store(const elem* __restrict__ qkv, const int* __restrict__ positions,
         const int* __restrict__ slots, const float* __restrict__ q_norm,
         const float* __restrict__ k_norm, const float* __restrict__ rope, elem* __restrict__ q,
         kv_elem* __restrict__ k_pages, kv_elem* __restrict__ v_pages,
         float* __restrict__ k_scales, float* __restrict__ v_scales, int heads, int kv_heads,
         int rotary_dim, int interleaved, int page_shift, float eps) {
  __shared__ float staged[WARPS][VX_HEAD];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x;
  int head = blockIdx.y * WARPS + warp, total = heads + 2 * kv_heads;
  if (head >= total) return;
  const elem* in = qkv + ((size_t)token * total + head) * VX_HEAD;
  bool is_query = head < heads, is_value = head >= heads + kv_heads;
  const float* norm = is_query ? q_norm : is_value ? nullptr : k_norm;
  const float* table = rope && !is_value ? rope + (size_t)positions[token] * rotary_dim : nullptr;
  int slot = slots[token], kv_head = is_query ? 0 : (head - heads) % kv_heads;
  if (!is_query && slot < 0) return;
  int page = slot >> page_shift, offset = slot & ((1 << page_shift) - 1);
  size_t line = is_query ? 0 : (((size_t)page * kv_heads + kv_head) << page_shift) + offset;
  store_head<VX_VEC>(in, staged[warp], norm, {table, rotary_dim, interleaved, eps},
                     is_query ? q + ((size_t)token * heads + head) * VX_HEAD : nullptr,
                     (is_value ? v_pages : k_pages) + line * VX_HEAD, (is_value ? v_scales : k_scales) + line);
}
VX_EXPORT(kv_store)
