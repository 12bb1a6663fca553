// Attention of many query tokens over paged keys and values, on tensor cores (FlashAttention-2, Dao
// 2023): prompts, chunks of prompts over a context, rows of different lengths in one launch.
//
// Layout: as paged_decode. `tiles` (N, 4) from a device buffer: row, first token, tokens, position of
//         the first token; rows of 0 tokens are unused. A tile holds 64 / VX_GROUP tokens: the
//         query heads of one kv head lie side by side, so that they share every key and value.
//         elem is bf16 or f16, D a multiple of 16. seen (T) or null: the last position that a token of a causal layer sees,
//         where that is not its own; never less than that of the token before it.
// Grid:   (N, H / VX_GROUP), 128 threads: a warp has 16 of 64 query rows; with heads above 256, whose sums no warp has
//         registers for, two warps have the same 16 of 32 rows, and half of the output's dimensions each. VX_KEYS keys at a time
//         come by cp.async into one of two stages while the other is used; 16 (Turing, large heads)
//         into one, for it has no cp.async and no room for two. Rows in shared memory
//         are D + 8 wide: an odd number of 16-byte units, so that ldmatrix meets no bank twice.
// Floor:  4 T C D H / 2 flop (causal); bytes: keys and values once for each tile.
#include "attention.h"
#include "kv_types.h"
#include "vx.h"

#ifndef VX_HEAD
#define VX_HEAD 128
#endif
#ifndef VX_GROUP
#define VX_GROUP 4
#endif
#ifndef VX_KEYS
#define VX_KEYS 64
#endif
#define THREADS 128
#define SPLIT (VX_HEAD > 256 ? 2 : 1)  // warps that share query rows, each with its part of the output's dimensions
#define PART (VX_HEAD / SPLIT)
#define QUERIES (64 / SPLIT)
#define STRIDE (VX_HEAD + 8)
#define UNITS (VX_HEAD / 8)  // of 16 bytes in a row
#define STEPS (VX_HEAD / 16)
#define STAGES (VX_KEYS == 16 ? 1 : 2)
// Query fragments stay in registers where there is room; they then pass through the second stage.
#define KEEP_QUERIES (VX_HEAD <= 128)

struct Context {
  const kv_elem *k_pages, *v_pages;
  const float *k_scales, *v_scales;
  const int* table;
  int kv_head, kv_heads, page_shift, end;
};

VX_DEV u32 pack2(float low, float high) {
  Pack<elem, 2> pack;
  pack.at[0] = from_float<elem>(low), pack.at[1] = from_float<elem>(high);
  return *reinterpret_cast<u32*>(&pack);
}

// 16 bytes of a key or value row into shared memory; a row beyond the end becomes zeros.
VX_DEV void copy_unit(elem* to, const kv_elem* from, const float* scale, bool exists) {
#if !VX_KV_SCALED
  vx_cp_async16(to, from, exists ? 16 : 0);
#else
  float v[8] = {};
  if (exists) {
    kv_unpack(v, load_pack<kv_elem, 8>(from));
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= *scale;
  }
  store(to, v);
#endif
}

VX_DEV void load_keys(elem* keys, elem* values, const Context& c, int first) {
  for (int i = threadIdx.x; i < VX_KEYS * UNITS; i += THREADS) {
    int row = i / UNITS, unit = i % UNITS, at = min(first + row, c.end - 1);
    bool exists = first + row < c.end;
    size_t page = (size_t)c.table[at >> c.page_shift] * c.kv_heads + c.kv_head;
    size_t line = (page << c.page_shift) + (at & ((1 << c.page_shift) - 1));
    size_t from = line * VX_HEAD + unit * 8, to = row * STRIDE + unit * 8;
    copy_unit(keys + to, c.k_pages + from, c.k_scales + line, exists);
    copy_unit(values + to, c.v_pages + from, c.v_scales + line, exists);
  }
}

// S (16 x VX_KEYS) = Q K^T of one warp. K rows are the columns of B: no transpose needed.
VX_DEV void scores(float (&s)[VX_KEYS / 8][4], const u32 (&kept)[STEPS][4], const elem* queries,
                   const elem* keys) {
  int warp = threadIdx.x / 32 / SPLIT, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < VX_KEYS / 8; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    u32 q[4] = {kept[step][0], kept[step][1], kept[step][2], kept[step][3]};
    if (!KEEP_QUERIES)
      vx_ldmatrix_x4(q, queries + (warp * 16 + lane % 16) * STRIDE + step * 16 + lane / 16 * 8);
#pragma unroll
    for (int pair = 0; pair < VX_KEYS / 16; pair++) {
      u32 k[4];
      vx_ldmatrix_x4(k, keys + (pair * 16 + lane % 8 + lane / 16 * 8) * STRIDE + step * 16 +
                            lane / 8 % 2 * 8);
      u32 low[2] = {k[0], k[1]}, high[2] = {k[2], k[3]};
      vx_mma(s[2 * pair], q, low, elem());
      vx_mma(s[2 * pair + 1], q, high, elem());
    }
  }
}

// O += P V of one warp; the accumulators of S are, rounded, the fragments of P.
VX_DEV void accumulate(float (&o)[PART / 8][4], const float (&p)[VX_KEYS / 8][4],
                       const elem* values) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < VX_KEYS / 16; step++) {
    u32 a[4] = {pack2(p[2 * step][0], p[2 * step][1]), pack2(p[2 * step][2], p[2 * step][3]),
                pack2(p[2 * step + 1][0], p[2 * step + 1][1]),
                pack2(p[2 * step + 1][2], p[2 * step + 1][3])};
#pragma unroll
    for (int pair = 0; pair < PART / 16; pair++) {
      u32 v[4];
      vx_ldmatrix_x4_trans(
          v, values + (step * 16 + lane % 16) * STRIDE + pair * 16 + lane / 16 * 8);
      u32 low[2] = {v[0], v[1]}, high[2] = {v[2], v[3]};
      vx_mma(o[2 * pair], a, low, elem());
      vx_mma(o[2 * pair + 1], a, high, elem());
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, VX_HEAD <= 64 ? 3 : VX_HEAD <= 128 ? 2 : 1)
paged_prefill(const elem* __restrict__ q, const kv_elem* __restrict__ k_pages,
              const kv_elem* __restrict__ v_pages, const float* __restrict__ k_scales,
              const float* __restrict__ v_scales, const int* __restrict__ tiles,
              const int* __restrict__ context_len, const int* __restrict__ block_table,
              const float* __restrict__ sinks, const int* __restrict__ seen,
              elem* __restrict__ out, int heads, int kv_heads, int table_stride, int page_shift,
              int window, int causal, float scale, float softcap) {
  VX_DYNAMIC_SHARED(memory);
  const int4 tile = reinterpret_cast<const int4*>(tiles)[blockIdx.x];
  int row = tile.x, token0 = tile.y, count = tile.z, position0 = tile.w;
  if (count == 0) return;
  int warp = threadIdx.x / 32 / SPLIT, part = threadIdx.x / 32 % SPLIT * PART;
  int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  int head0 = blockIdx.y * VX_GROUP, last_position = position0 + count - 1, begin;
  int end = context_len[row];
  if (causal) end = (seen ? seen[token0 + count - 1] : last_position) + 1;
  begin = max(0, first_seen(position0, window));  // pages of earlier positions may be gone
  if (window > 0 && !causal) end = min(end, last_position + window);
  Context context = {k_pages, v_pages, k_scales, v_scales,
                     block_table + (size_t)row * table_stride,
                     head0 / (heads / kv_heads), kv_heads, page_shift, end};
  // a stage holds keys, then values
  elem* stages = reinterpret_cast<elem*>(memory);
  const int stage_size = 2 * VX_KEYS * STRIDE;
  elem* queries = stages + (KEEP_QUERIES ? 1 : STAGES) * stage_size;

  for (int i = threadIdx.x; i < QUERIES * UNITS; i += THREADS) {
    int r = i / UNITS, unit = i % UNITS, token = r / VX_GROUP;
    bool exists = token < count;  // a tile has at most QUERIES / VX_GROUP tokens
    size_t from = ((size_t)(token0 + (exists ? token : 0)) * heads + head0 + r % VX_GROUP) * VX_HEAD;
    vx_cp_async16(queries + r * STRIDE + unit * 8, q + from + unit * 8, exists ? 16 : 0);
  }
  load_keys(stages, stages + VX_KEYS * STRIDE, context, begin);
  vx_cp_commit();
  u32 kept[STEPS][4] = {};
  if (KEEP_QUERIES) {
    vx_cp_wait<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      vx_ldmatrix_x4(kept[step],
                     queries + (warp * 16 + lane % 16) * STRIDE + step * 16 + lane / 16 * 8);
    __syncthreads();  // the second stage is filled next
  }

  int low[2], high[2];  // keys that the rows of this lane see
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int token = (warp * 16 + group + 8 * r) / VX_GROUP, position = position0 + token;
    low[r] = first_seen(position, window);
    high[r] = causal ? position + 1 : window > 0 ? position + window : end;
    if (seen) high[r] = seen[token0 + min(token, count - 1)] + 1;
    high[r] = min(high[r], end);
  }
  float o[PART / 8][4], top[2] = {NOTHING, NOTHING}, sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < PART / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;

  for (int first = begin, stage = 0; first < end; first += VX_KEYS, stage ^= 1) {
    if (STAGES == 1) {
      if (first > begin) load_keys(stages, stages + VX_KEYS * STRIDE, context, first);
      vx_cp_commit();
      vx_cp_wait<0>();
    } else if (first + VX_KEYS < end) {
      elem* next = stages + (stage ^ 1) * stage_size;
      load_keys(next, next + VX_KEYS * STRIDE, context, first + VX_KEYS);
      vx_cp_commit();
      vx_cp_wait<1>();
    } else {
      vx_cp_wait<0>();
    }
    __syncthreads();
    const elem* keys = stages + (STAGES == 1 ? 0 : stage) * stage_size;
    float s[VX_KEYS / 8][4], greatest[2] = {top[0], top[1]};
    scores(s, kept, queries, keys);
#pragma unroll
    for (int i = 0; i < VX_KEYS / 8; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int key = first + i * 8 + 2 * quarter + e % 2;
        bool visible = key >= low[e / 2] && key < high[e / 2];
        s[i][e] = visible ? to_log2(s[i][e] * scale, softcap) : -VX_INFINITY;
        greatest[e / 2] = fmaxf(greatest[e / 2], s[i][e]);
      }
#pragma unroll
    for (int r = 0; r < 2; r++) {  // the rows of this lane are shared by its quad
      greatest[r] = fmaxf(greatest[r], __shfl_xor_sync(VX_ALL, greatest[r], 1));
      greatest[r] = fmaxf(greatest[r], __shfl_xor_sync(VX_ALL, greatest[r], 2));
      float factor = exp2f(top[r] - greatest[r]);
      top[r] = greatest[r], sum[r] *= factor;
#pragma unroll
      for (int i = 0; i < PART / 8; i++) o[i][2 * r] *= factor, o[i][2 * r + 1] *= factor;
    }
#pragma unroll
    for (int i = 0; i < VX_KEYS / 8; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[i][e] = exp2f(s[i][e] - top[e / 2]);
        sum[e / 2] += s[i][e];
      }
    accumulate(o, s, keys + VX_KEYS * STRIDE + part);
    __syncthreads();  // this stage is refilled in the next round
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(VX_ALL, sum[r], 1);
    sum[r] += __shfl_xor_sync(VX_ALL, sum[r], 2);
    int at = warp * 16 + group + 8 * r, token = at / VX_GROUP, head = head0 + at % VX_GROUP;
    if (token >= count) continue;
    float factor = normaliser(sinks, head, top[r], sum[r]);
    elem* to = out + ((size_t)(token0 + token) * heads + head) * VX_HEAD + part + 2 * quarter;
#pragma unroll
    for (int i = 0; i < PART / 8; i++)
      *reinterpret_cast<u32*>(to + i * 8) = pack2(o[i][2 * r] * factor, o[i][2 * r + 1] * factor);
  }
}
VX_EXPORT(paged_prefill)
