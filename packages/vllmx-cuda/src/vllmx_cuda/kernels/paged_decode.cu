// Attention of single query tokens over paged keys and values, split over the context.
//
// paged_decode:  one work item = one query token and one range of positions. A block takes an item,
//                a key/value head and VX_GROUP of its query heads, which share every load. Where an
//                item is its token's only one, the block writes the answer itself; else it leaves
//                an unnormalised sum, its maximum and its weight.
// paged_combine: joins the items of each token.
//
// The items come from device buffers, so that one captured graph serves any lengths: `items`
// (N, 4) holds token, row, begin, end; a token of -1 marks the unused rest. `first_item` (T + 1)
// says which items are a token's; they must be neighbours.
//
// Layout: q, out (T, H, D) of elem; pages (blocks, K, P, D) as kv_store writes them; block_table
//         (R, table_stride); partial (N, H, D) and weights (N, H, 2) of f32: maximum, sum of
//         weights, both in units of log2. sinks (H) of f32 or null.
// Grid:   (N, H / VX_GROUP), 128 threads. A team of 8, 16 or 32 lanes has one token of the
//         context at a time, a lane VX_VEC of its D values, four tokens in flight.
//         combine: (T, H), 128 threads.
// Floor:  bytes: keys and values once for each tile of VX_GROUP query heads.
//         A key and its value (head 128) cost a warp 74 instructions for one head, 120 for two, 166 for three (sm_90a).
#include "attention.h"
#include "kv_types.h"
#include "vx.h"

#ifndef VX_HEAD
#define VX_HEAD 128
#endif
#ifndef VX_GROUP
#define VX_GROUP 4
#endif
#define THREADS 128
#define SLICES (VX_HEAD / VX_VEC)
#define LANES (SLICES <= 1 ? 1 : SLICES <= 2 ? 2 : SLICES <= 4 ? 4 : SLICES <= 8 ? 8 : SLICES <= 16 ? 16 : 32)
#define TEAMS (THREADS / LANES)
#define IN_FLIGHT (VX_VEC == 16 ? 2 : 4)

struct Running {
  float top[VX_GROUP], sum[VX_GROUP], out[VX_GROUP][VX_VEC];
};

// Score of one token for each query head, in units of log2, joined over the team.
VX_DEV void score(float (&s)[VX_GROUP], const float (&q)[VX_GROUP][VX_VEC],
                  const float (&k)[VX_VEC], float scale, float softcap) {
#pragma unroll
  for (int g = 0; g < VX_GROUP; g++) {
    float dot = 0.f;
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) dot += q[g][j] * k[j];
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes >>= 1)
      dot += __shfl_xor_sync(VX_ALL, dot, lanes);
    dot *= scale;
    s[g] = to_log2(dot, softcap);
  }
}

// Joins what the teams of a block found; thread d of a head adds up dimension d.
VX_DEV void join(float (*outs)[VX_GROUP][VX_HEAD], float (*tops)[VX_GROUP],
                 float (*sums)[VX_GROUP], int g, int d, float& top, float& sum, float& acc) {
  top = NOTHING, sum = 0.f, acc = 0.f;
  for (int t = 0; t < TEAMS; t++) top = fmaxf(top, tops[t][g]);
  for (int t = 0; t < TEAMS; t++) {
    float factor = exp2f(tops[t][g] - top);
    sum += sums[t][g] * factor;
    acc += outs[t][g][d] * factor;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, VX_GROUP <= 2 && VX_VEC < 16 ? 4 : 2)
paged_decode(const elem* __restrict__ q, const kv_elem* __restrict__ k_pages,
             const kv_elem* __restrict__ v_pages, const float* __restrict__ k_scales,
             const float* __restrict__ v_scales, const int* __restrict__ items,
             const int* __restrict__ first_item, const int* __restrict__ positions,
             const int* __restrict__ block_table, const float* __restrict__ sinks,
             elem* __restrict__ out, float* __restrict__ partial, float* __restrict__ weights,
             int heads, int kv_heads, int table_stride, int page_shift, int window, float scale,
             float softcap) {
  __shared__ float outs[TEAMS][VX_GROUP][VX_HEAD];
  __shared__ float tops[TEAMS][VX_GROUP], sums[TEAMS][VX_GROUP];
  const int4 item = reinterpret_cast<const int4*>(items)[blockIdx.x];
  int token = item.x;
  if (token < 0) return;
  int team = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  int tiles = heads / kv_heads / VX_GROUP, kv_head = blockIdx.y / tiles;
  int head0 = kv_head * (heads / kv_heads) + blockIdx.y % tiles * VX_GROUP;
  int begin = item.z, end = item.w, position = positions[token];
  begin = max(begin, first_seen(position, window));
  if (window > 0) end = min(end, position + window);
  const int* table = block_table + (size_t)item.y * table_stride;
  bool holds = lane < SLICES;  // lanes beyond the head size only take part in shuffles

  float query[VX_GROUP][VX_VEC] = {};
  Running now;
#pragma unroll
  for (int g = 0; g < VX_GROUP; g++) {
    if (holds) load(query[g], q + ((size_t)token * heads + head0 + g) * VX_HEAD + lane * VX_VEC);
    now.top[g] = NOTHING, now.sum[g] = 0.f;
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) now.out[g][j] = 0.f;
  }
  // all teams run the same rounds, so that shuffles see whole warps
  for (int base = begin; base < end; base += TEAMS * IN_FLIGHT) {
    Pack<kv_elem, VX_VEC> keys[IN_FLIGHT], values[IN_FLIGHT];
    float s[IN_FLIGHT][VX_GROUP], value_scale[IN_FLIGHT];
    size_t rows[IN_FLIGHT];
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; u++) {
      int at = min(base + u * TEAMS + team, end - 1);
      size_t page = (size_t)table[at >> page_shift] * kv_heads + kv_head;
      rows[u] = (page << page_shift) + (at & ((1 << page_shift) - 1));
      size_t where = rows[u] * VX_HEAD + (holds ? lane : 0) * VX_VEC;
      keys[u] = load_pack<kv_elem, VX_VEC>(k_pages + where);
      values[u] = load_pack<kv_elem, VX_VEC>(v_pages + where);
    }
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; u++) {
      float key[VX_VEC], key_scale = scale;
      kv_unpack(key, keys[u]);
      value_scale[u] = 1.f;
#if VX_KV_SCALED
      key_scale *= k_scales[rows[u]], value_scale[u] = v_scales[rows[u]];
#endif
      score(s[u], query, key, key_scale, softcap);
      if (base + u * TEAMS + team >= end)
#pragma unroll
        for (int g = 0; g < VX_GROUP; g++) s[u][g] = -VX_INFINITY;
    }
#pragma unroll
    for (int g = 0; g < VX_GROUP; g++) {
      float top = now.top[g];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; u++) top = fmaxf(top, s[u][g]);
      float factor = exp2f(now.top[g] - top);
      now.top[g] = top, now.sum[g] *= factor;
#pragma unroll
      for (int j = 0; j < VX_VEC; j++) now.out[g][j] *= factor;
    }
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; u++) {
      float value[VX_VEC];
      kv_unpack(value, values[u]);
#pragma unroll
      for (int g = 0; g < VX_GROUP; g++) {
        float p = exp2f(s[u][g] - now.top[g]);
        now.sum[g] += p, p *= value_scale[u];
#pragma unroll
        for (int j = 0; j < VX_VEC; j++) now.out[g][j] += p * value[j];
      }
    }
  }
#pragma unroll
  for (int g = 0; g < VX_GROUP; g++) {
#pragma unroll
    for (int j = 0; j < VX_VEC; j++)
      if (holds) outs[team][g][lane * VX_VEC + j] = now.out[g][j];
    if (lane == 0) tops[team][g] = now.top[g], sums[team][g] = now.sum[g];
  }
  __syncthreads();
  bool alone = first_item[token + 1] - first_item[token] == 1;
  for (int i = threadIdx.x; i < VX_GROUP * VX_HEAD; i += THREADS) {
    int g = i / VX_HEAD, d = i % VX_HEAD;
    float top, sum, acc;
    join(outs, tops, sums, g, d, top, sum, acc);
    if (alone) {
      out[((size_t)token * heads + head0 + g) * VX_HEAD + d] =
          from_float<elem>(acc * normaliser(sinks, head0 + g, top, sum));
      continue;
    }
    size_t row = (size_t)blockIdx.x * heads + head0 + g;
    partial[row * VX_HEAD + d] = acc;
    if (d == 0) weights[2 * row] = top, weights[2 * row + 1] = sum;
  }
}
VX_EXPORT(paged_decode)

extern "C" __global__ void __launch_bounds__(THREADS)
paged_combine(const float* __restrict__ partial, const float* __restrict__ weights,
              const int* __restrict__ first_item, const float* __restrict__ sinks,
              elem* __restrict__ out, int heads) {
  int token = blockIdx.x, head = blockIdx.y, first = first_item[token], last = first_item[token + 1];
  if (last - first == 1) return;  // paged_decode has written the answer
  float top = NOTHING, sum = 0.f;
  for (int i = first; i < last; i++) top = fmaxf(top, weights[2 * ((size_t)i * heads + head)]);
  for (int i = first; i < last; i++) {
    const float* w = weights + 2 * ((size_t)i * heads + head);
    sum += w[1] * exp2f(w[0] - top);
  }
  float scale = normaliser(sinks, head, top, sum);
  for (int d = threadIdx.x; d < VX_HEAD; d += THREADS) {
    float acc = 0.f;
    for (int i = first; i < last; i++) {
      size_t row = (size_t)i * heads + head;
      acc += partial[row * VX_HEAD + d] * exp2f(weights[2 * row] - top);
    }
    out[((size_t)token * heads + head) * VX_HEAD + d] = from_float<elem>(acc * scale);
  }
}
VX_EXPORT(paged_combine)
