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
#include "kv_types.h"
#include "vx.h"

#ifndef VX_HEAD
#define VX_HEAD 128
#endif
#define WARPS 4

// The rotated value of dimension i of a head
VX_DEV float rotated(const float* head, const float* table, int i, int rotary_dim,
                     int interleaved) {
  int half = rotary_dim / 2;
  if (i >= rotary_dim) return head[i];
  int pair = interleaved ? i / 2 : i % half;
  bool first = interleaved ? i % 2 == 0 : i < half;
  float partner = head[interleaved ? i ^ 1 : (first ? i + half : i - half)];
  float cosine = table[pair], sine = table[half + pair];
  return head[i] * cosine + (first ? -partner : partner) * sine;
}

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
  float* row = staged[warp];
  bool is_query = head < heads, is_value = head >= heads + kv_heads;
  const float* norm = is_query ? q_norm : is_value ? nullptr : k_norm;

  float ss = 0.f;
  for (int i = lane * VX_VEC; i < VX_HEAD; i += 32 * VX_VEC) {
    float v[VX_VEC];
    load(v, in + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) ss += v[j] * v[j], row[i + j] = v[j];
  }
  if (norm && eps > 0.f) {
    float scale = rsqrtf(warp_sum(ss) / VX_HEAD + eps);
    for (int i = lane * VX_VEC; i < VX_HEAD; i += 32 * VX_VEC)
#pragma unroll
      for (int j = 0; j < VX_VEC; j++) row[i + j] *= scale * norm[i + j];
  }
  __syncwarp();

  bool rotates = rope && !is_value;
  const float* table = rotates ? rope + (size_t)positions[token] * rotary_dim : nullptr;
  if (norm && eps < 0.f) {
    float turned[(VX_HEAD + 31) / 32];
    ss = 0.f;
    for (int i = lane, n = 0; i < VX_HEAD; i += 32, n++) {
      turned[n] = rotates ? rotated(row, table, i, rotary_dim, interleaved) : row[i];
      ss += turned[n] * turned[n];
    }
    float scale = rsqrtf(warp_sum(ss) / VX_HEAD - eps);
    __syncwarp();  // all lanes have read what they rotate
    for (int i = lane, n = 0; i < VX_HEAD; i += 32, n++) row[i] = turned[n] * scale * norm[i];
    __syncwarp();
    rotates = false;
  }
  int slot = slots[token], kv_head = is_query ? 0 : (head - heads) % kv_heads;
  size_t page_row = 0;
  if (!is_query) {
    if (slot < 0) return;
    int page = slot >> page_shift, offset = slot & ((1 << page_shift) - 1);
    page_row = (((size_t)page * kv_heads + kv_head) << page_shift) + offset;
  }
  elem* query_out = q + ((size_t)token * heads + head) * VX_HEAD;
  kv_elem* pages_out = (is_value ? v_pages : k_pages) + page_row * VX_HEAD;
  CodeScale code = {};
#if VX_KV_SCALED
  u32 top = 0;
  for (int i = lane; i < VX_HEAD; i += 32) {
    float v = rotates ? rotated(row, table, i, rotary_dim, interleaved) : row[i];
    top = max(top, __float_as_uint(fabsf(v)));
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) top = max(top, __shfl_xor_sync(VX_ALL, top, lanes));
  code = code_scale(top);
  if (!is_query && lane == 0) (is_value ? v_scales : k_scales)[page_row] = code.scale;
#endif
  for (int i = lane * VX_VEC; i < VX_HEAD; i += 32 * VX_VEC) {
    float v[VX_VEC];
#pragma unroll
    for (int j = 0; j < VX_VEC; j++)
      v[j] = rotates ? rotated(row, table, i + j, rotary_dim, interleaved) : row[i + j];
    if (is_query) {
      store(query_out + i, v);
    } else {
      kv_write(pages_out + i, v, code);
    }
  }
}
VX_EXPORT(kv_store)
