// paged_decode on tensor cores, for 16-bit elem and head sizes 64, 128 and 192: the same arguments,
// the same items, joined by the same paged_combine.
//
// The query heads of one kv head, up to 16, are the rows of the products, so every key and value is
// read once for all of them, and a key costs a warp some ten instructions whatever their number.
//
// Layout: as paged_decode. Keys and values go from memory straight into fragments by 16-byte loads,
//         without shared memory, because the order inside a product is free where both sides agree:
//         - scores: a lane takes 8 neighbours of 32 dimensions of a key and feeds two products with
//           them, values 0-3 the first, 4-7 the second; the queries are laid out alike;
//         - output: column g of product j stands for dimension 8 g + j of 64, so that a lane needs
//           8 neighbours of a value and pairs them, key by key, with a byte permute.
// Grid:   (N, H / VX_GROUP), 128 threads: each of 4 warps has every fourth tile of 16 keys.
// Floor:  bytes: keys and values once.
#include "attention.h"
#include "kv_types.h"
#include "vx.h"

#ifndef VX_HEAD
#define VX_HEAD 128
#endif
#ifndef VX_GROUP
#define VX_GROUP 4
#endif
#define WARPS 4
#define KEYS 16
#define PIECES (VX_HEAD / 32)  // of a key
#define SLABS (VX_HEAD / 64)   // of a value
#define BOTH (VX_GROUP > 8)    // whether rows 8 to 15 of the products are used
#define EARLY (VX_HEAD <= 128) // whether keys and values are all under way at once

// Where a position lies in the pages
struct Lines {
  const int* table;
  int kv_head, kv_heads, page_shift;
  VX_DEV size_t of(int position) const {
    size_t page = (size_t)table[position >> page_shift] * kv_heads + kv_head;
    return (page << page_shift) + (position & ((1 << page_shift) - 1));
  }
};

// 8 neighbours as elem; codes are exact in it
VX_DEV uint4 load_elems(const kv_elem* p) {
#if VX_KV_SCALED
  float v[8];
  kv_unpack(v, load_pack<kv_elem, 8>(p));
  Pack<elem, 8> pack;
#pragma unroll
  for (int i = 0; i < 8; i++) pack.at[i] = from_float<elem>(v[i]);
  return *reinterpret_cast<uint4*>(&pack);
#else
  return *reinterpret_cast<const uint4*>(p);
#endif
}
VX_DEV u32 pack2(float low, float high) {
  Pack<elem, 2> pack;
  pack.at[0] = from_float<elem>(low), pack.at[1] = from_float<elem>(high);
  return *reinterpret_cast<u32*>(&pack);
}
// D += A B
VX_DEV void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  u32 a[4] = {a0, BOTH ? a1 : 0, a2, BOTH ? a3 : 0}, b[2] = {b0, b1};
  vx_mma(d, a, b, elem());
}

// Products of 8 keys with all query heads
VX_DEV void score(float (&s)[4], const uint4 (&query)[2][PIECES], const uint4 (&keys)[PIECES]) {
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const uint4 &a = query[0][p], &b = query[1][p], &k = keys[p];
    multiply(s, a.x, b.x, a.y, b.y, k.x, k.y);
    multiply(s, a.z, b.z, a.w, b.w, k.z, k.w);
  }
}

// Elements j of two packs side by side
VX_DEV u32 pair_of(const uint4& a, const uint4& b, int j) {
  u32 x = j < 2 ? a.x : j < 4 ? a.y : j < 6 ? a.z : a.w;
  u32 y = j < 2 ? b.x : j < 4 ? b.y : j < 6 ? b.z : b.w;
  return __byte_perm(x, y, j % 2 ? 0x7632 : 0x5410);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, VX_HEAD < 128 ? 4 : 2)
paged_decode_mma(const elem* __restrict__ q, const kv_elem* __restrict__ k_pages,
                 const kv_elem* __restrict__ v_pages, const float* __restrict__ k_scales,
                 const float* __restrict__ v_scales, const int* __restrict__ items,
                 const int* __restrict__ first_item, const int* __restrict__ positions,
                 const int* __restrict__ block_table, const float* __restrict__ sinks,
                 elem* __restrict__ out, float* __restrict__ partial, float* __restrict__ weights,
                 int heads, int kv_heads, int table_stride, int page_shift, int window,
                 float scale, float softcap) {
  VX_DYNAMIC_SHARED(memory);
  const int4 item = reinterpret_cast<const int4*>(items)[blockIdx.x];
  int token = item.x, begin = item.z, end = item.w;
  if (token < 0) return;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  int head0 = blockIdx.y * VX_GROUP, position = positions[token];
  if (window > 0) begin = max(begin, position - window + 1), end = min(end, position + window);
  Lines lines = {block_table + (size_t)item.y * table_stride, head0 / (heads / kv_heads), kv_heads,
                 page_shift};

  uint4 query[2][PIECES] = {};
#pragma unroll
  for (int r = 0; r < 1 + BOTH; r++)
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      if (group + 8 * r >= VX_GROUP) continue;
      const elem* row = q + ((size_t)token * heads + head0 + group + 8 * r) * VX_HEAD;
      query[r][p] = *reinterpret_cast<const uint4*>(row + p * 32 + quarter * 8);
    }
  float o[SLABS][8][4] = {}, top[2] = {NOTHING, NOTHING}, sum[2] = {0.f, 0.f};

  for (int first = begin + warp * KEYS; first < end; first += WARPS * KEYS) {
    float s[2][4] = {}, key_scale[2][2], value_scale[2][2];
    uint4 keys[2][PIECES], values[4][SLABS];
    size_t value_lines[4];
#pragma unroll
    for (int u = 0; u < 2; u++) {
      size_t line = lines.of(min(first + 8 * u + group, end - 1));
#pragma unroll
      for (int p = 0; p < PIECES; p++)
        keys[u][p] = load_elems(k_pages + line * VX_HEAD + p * 32 + quarter * 8);
      if (!EARLY) score(s[u], query, keys[u]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {  // keys 2 quarter, the next, and both of the second half
      size_t line = lines.of(min(first + i / 2 * 8 + 2 * quarter + i % 2, end - 1));
      value_lines[i] = line * VX_HEAD + group * 8;
#pragma unroll
      for (int c = 0; EARLY && c < SLABS; c++)
        values[i][c] = load_elems(v_pages + value_lines[i] + c * 64);
      key_scale[i / 2][i % 2] = scale, value_scale[i / 2][i % 2] = 1.f;
#if VX_KV_SCALED
      key_scale[i / 2][i % 2] *= k_scales[line], value_scale[i / 2][i % 2] = v_scales[line];
#endif
    }
#pragma unroll
    for (int u = 0; EARLY && u < 2; u++) score(s[u], query, keys[u]);
    float greatest[2] = {top[0], top[1]};
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        bool visible = first + 8 * u + 2 * quarter + e % 2 < end;
        s[u][e] = visible ? to_log2(s[u][e] * key_scale[u][e % 2], softcap) : -VX_INFINITY;
        greatest[e / 2] = fmaxf(greatest[e / 2], s[u][e]);
      }
#pragma unroll
    for (int r = 0; r < 1 + BOTH; r++) {  // a row is shared by four lanes
      greatest[r] = fmaxf(greatest[r], __shfl_xor_sync(VX_ALL, greatest[r], 1));
      greatest[r] = fmaxf(greatest[r], __shfl_xor_sync(VX_ALL, greatest[r], 2));
      if (!__any_sync(VX_ALL, greatest[r] > top[r])) continue;
      float factor = exp2f(top[r] - greatest[r]);
      top[r] = greatest[r], sum[r] *= factor;
#pragma unroll
      for (int c = 0; c < SLABS; c++)
#pragma unroll
        for (int j = 0; j < 8; j++) o[c][j][2 * r] *= factor, o[c][j][2 * r + 1] *= factor;
    }
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (!BOTH && e >= 2) continue;
        s[u][e] = exp2f(s[u][e] - top[e / 2]);
        sum[e / 2] += s[u][e];
        s[u][e] *= value_scale[u][e % 2];
      }
    u32 p[4] = {pack2(s[0][0], s[0][1]), pack2(s[0][2], s[0][3]), pack2(s[1][0], s[1][1]),
                pack2(s[1][2], s[1][3])};
#pragma unroll
    for (int c = 0; c < SLABS; c++) {
#pragma unroll
      for (int i = 0; !EARLY && i < 4; i++)
        values[i][c] = load_elems(v_pages + value_lines[i] + c * 64);
#pragma unroll
      for (int j = 0; j < 8; j++)
        multiply(o[c][j], p[0], p[1], p[2], p[3], pair_of(values[0][c], values[1][c], j),
                 pair_of(values[2][c], values[3][c], j));
    }
  }

  float* outs = reinterpret_cast<float*>(memory);     // (WARPS, VX_GROUP, VX_HEAD)
  float* tops = outs + WARPS * VX_GROUP * VX_HEAD;    // (WARPS, VX_GROUP)
  float* sums = tops + WARPS * VX_GROUP;
#pragma unroll
  for (int r = 0; r < 1 + BOTH; r++) {
    sum[r] += __shfl_xor_sync(VX_ALL, sum[r], 1);
    sum[r] += __shfl_xor_sync(VX_ALL, sum[r], 2);
    int row = warp * VX_GROUP + group + 8 * r;
    if (group + 8 * r >= VX_GROUP) continue;
    if (quarter == 0) tops[row] = top[r], sums[row] = sum[r];
#pragma unroll
    for (int c = 0; c < SLABS; c++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float* to = outs + row * VX_HEAD + c * 64 + 8 * (2 * quarter + e);
#pragma unroll
        for (int j = 0; j < 8; j++) to[j] = o[c][j][2 * r + e];
      }
  }
  __syncthreads();
  bool alone = first_item[token + 1] - first_item[token] == 1;
  for (int i = threadIdx.x; i < VX_GROUP * VX_HEAD; i += 32 * WARPS) {
    int g = i / VX_HEAD, d = i % VX_HEAD;
    float best = NOTHING, mass = 0.f, value = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) best = fmaxf(best, tops[w * VX_GROUP + g]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      float factor = exp2f(tops[w * VX_GROUP + g] - best);
      mass += sums[w * VX_GROUP + g] * factor;
      value += outs[(w * VX_GROUP + g) * VX_HEAD + d] * factor;
    }
    if (alone) {
      out[((size_t)token * heads + head0 + g) * VX_HEAD + d] =
          from_float<elem>(value * normaliser(sinks, head0 + g, best, mass));
      continue;
    }
    size_t row = (size_t)blockIdx.x * heads + head0 + g;
    partial[row * VX_HEAD + d] = value;
    if (d == 0) weights[2 * row] = best, weights[2 * row + 1] = mass;
  }
}
VX_EXPORT(paged_decode_mma)
