// Single query tokens on tensor cores, for 16-bit elem and head sizes that 16 divides (above 128: 32): the items of
// paged_decode. The last block of a token to arrive joins its items' results, in their order; a token without items,
// below the number of blocks, gets zeros.
//
// With VX_STORE 1 it does kv_store's work for tokens that are alone in their row: q is qkv (T, H + 2K, D), a block
// normalises and rotates its query heads, and the one whose item has the token's own position first stores K and V.
// Then VX_GROUP is H / K, and nobody else reads that position.
//
// Every key and value is read once for up to 16 query heads of its kv head, and a key costs a warp
// some ten instructions whatever their number.
//
// Layout: as paged_decode. Keys and values go from memory straight into fragments by loads of up to
//         16 bytes, without shared memory (so that no head size can meet a bank twice), because the
//         order inside a product is free where both sides agree:
//         - scores = Q K^T, heads are rows, in tiles of 8 keys: a lane takes 8 neighbours of 32
//           dimensions of a key and feeds two products with them; of 16 left over it takes 4;
//         - output^T = V^T P^T, heads are columns, in tiles of 16 dimensions: with up to 8 heads no
//           part of an accumulator is idle, and the scores are its fragments as they stand. A lane
//           takes 8 neighbours of 64 dimensions of a value, 4 of 32 and 2 of 16 left over; each
//           two are its rows of one tile, paired key by key with a byte permute.
// Grid:   (N, H / VX_GROUP), 128 threads: each of 4 warps has every fourth tile of 16 keys. VX_GROUP
//         is 16 at most, 8 with heads above 192, where the sums would take all registers.
// Floor:  bytes: keys and values once.
//         A key and its value (head 128) cost a warp 29 instructions (sm_90a) for up to 8 heads, 41 for 16, 46 with
//         8-bit pages. An H100's memory brings their 512 bytes to a processor in the time of 140 instructions, an H200's in
//         that of 100.
#include "attention.h"
#include "kv_types.h"
#include "outputs.h"
#include "vx.h"

#ifndef VX_HEAD
#define VX_HEAD 128
#endif
#ifndef VX_STORE
#define VX_STORE 0
#endif
#if VX_STORE
#include "head_store.h"
#define LANE_DIMS (VX_HEAD / 32)  // of a head
#define STORE_VEC (LANE_DIMS % 2 || VX_HEAD < 64 ? 1 : LANE_DIMS % 4 ? 2 : LANE_DIMS % 8 ? 4 : 8)  // as of kv_store
#endif
#ifndef VX_GROUP
#define VX_GROUP 4
#endif
#define WARPS 4
#define KEYS 16
#define TILES (VX_GROUP > 8 ? 2 : 1)  // of 8 query heads
#define PIECES (VX_HEAD / 32)         // of a key, and 16 dimensions left over or none
#define SLABS (VX_HEAD / 64)          // of a value, and 32 and 16 dimensions left over or none
#define KEY_PAIRS (VX_HEAD / 8)       // that a lane has of a key and of a query
#define PAIRS (VX_HEAD / 16)          // that a lane has of a value
// Registers of a lane: sums and queries; keys and values, which are all under way at once
#define LIVE (TILES * (VX_HEAD / 4 + KEY_PAIRS) + 2 * KEY_PAIRS + 4 * PAIRS)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000  // where compilers take some registers more
#define BLOCKS (LIVE <= 80 ? 4 : LIVE <= 104 ? 3 : 2)
#else
#define BLOCKS (LIVE <= 80 ? 4 : LIVE <= 112 ? 3 : 2)
#endif
#define KEEP_QUERIES (LIVE <= 192)  // in registers; else in shared memory
#define JOIN_STRIDE 68  // floats of 64 dimensions: lanes of neighbouring heads meet no bank twice

// Where a position lies in the pages: 2^32 lines would be 64 GiB at least, of keys of one layer
struct Lines {
  const int* table;
  u32 kv_head, kv_heads, page_shift;
  VX_DEV u32 of(u32 position) const {
    u32 page = table[position >> page_shift] * kv_heads + kv_head;
    return (page << page_shift) + (position & ((1u << page_shift) - 1));
  }
};

// N neighbours as pairs of elem
template <int N> VX_DEV void load_pairs(u32* to, const elem* p) {
  Pack<elem, N> pack = load_pack<elem, N>(p);
#pragma unroll
  for (int i = 0; i < N / 2; i++) to[i] = reinterpret_cast<const u32*>(&pack)[i];
}
#if VX_KV_SCALED
template <int N> VX_DEV void load_pairs(u32* to, const kv_elem* p) {
  Pack<kv_elem, N> pack = load_pack<kv_elem, N>(p);
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    u32 word = N == 2 ? *reinterpret_cast<const u16*>(&pack)
                      : reinterpret_cast<const u32*>(&pack)[i / 2];
    to[i] = VX_KV == VX_KV_E4M3 ? e4m3_pair(word, i % 2) : int8_pair(word, i % 2);
  }
}
#endif

// A lane's part of a key or query
template <class T> VX_DEV void load_key(u32 (&to)[KEY_PAIRS], const T* row, int quarter) {
#pragma unroll
  for (int p = 0; p < PIECES; p++) load_pairs<8>(to + 4 * p, row + 32 * p + 8 * quarter);
  if (VX_HEAD % 32) load_pairs<4>(to + KEY_PAIRS - 2, row + VX_HEAD - 16 + 4 * quarter);
}
// A lane's part of a value
VX_DEV void load_value(u32 (&to)[PAIRS], const kv_elem* row, int group) {
#pragma unroll
  for (int c = 0; c < SLABS; c++) load_pairs<8>(to + 4 * c, row + 64 * c + 8 * group);
  if (VX_HEAD % 64 >= 32) load_pairs<4>(to + 4 * SLABS, row + 64 * SLABS + 4 * group);
  if (VX_HEAD % 32) load_pairs<2>(to + PAIRS - 1, row + VX_HEAD - 16 + 2 * group);
}

// Products of 16 keys with all query heads; `queries`: where they are not kept
VX_DEV void score(float (&s)[2][4], const u32 (&kept)[TILES][KEY_PAIRS], const uint4* queries,
                  const u32 (&keys)[2][KEY_PAIRS]) {
#pragma unroll
  for (int p = 0; p < KEY_PAIRS / 2; p += 2) {  // products by two: the last may stand alone
    u32 q[2][4] = {};
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      if (!KEEP_QUERIES) {
        uint4 raw = queries[(t * PIECES + p / 2) * 32 + threadIdx.x % 32];
        q[t][0] = raw.x, q[t][1] = raw.y, q[t][2] = raw.z, q[t][3] = raw.w;
      }
#pragma unroll
      for (int i = 0; KEEP_QUERIES && i < 4 && 2 * p + i < KEY_PAIRS; i++)
        q[t][i] = kept[t][2 * p + i];
    }
#pragma unroll
    for (int i = 0; i < 2 && p + i < KEY_PAIRS / 2; i++)
#pragma unroll
      for (int u = 0; u < 2; u++) {
        u32 a[4] = {q[0][2 * i], q[1][2 * i], q[0][2 * i + 1], q[1][2 * i + 1]};
        u32 b[2] = {keys[u][2 * (p + i)], keys[u][2 * (p + i) + 1]};
        vx_mma(s[u], a, b, elem());
      }
  }
}

// One branch for all of them
VX_DEV void to_log2(float (&s)[2][4], const float (&scale)[2][2], float softcap) {
#pragma unroll
  for (int i = 0; i < 8; i++) s[i / 4][i % 4] *= scale[i / 4][i % 2];
  if (softcap > 0.f)
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i % 4 < 2 * TILES) s[i / 4][i % 4] = softcap * tanhf(s[i / 4][i % 4] / softcap);
#pragma unroll
  for (int i = 0; i < 8; i++) s[i / 4][i % 4] *= LOG2E;
}

// One part of the joined sums: dimensions from `base` on, 8 * SIDE of them, which a lane has SIDE
// neighbours of. finals: what each head's sum is multiplied by.
template <int SIDE>
VX_DEV void join(int base, const float (&o)[TILES][PAIRS][4], const float (&factor)[TILES][2],
                 float* outs, const float* finals, elem* out, float* partial) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int head = 8 * t + 2 * quarter + e;
      float* to = outs + (warp * VX_GROUP + head) * JOIN_STRIDE + group;
      if (head >= VX_GROUP) continue;
#pragma unroll
      for (int i = 0; i < SIDE; i++)
        to[8 * i] = o[t][base / 16 + i / 2][2 * (i % 2) + e] * factor[t][e];
    }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < VX_GROUP * 8 * SIDE; i += 32 * WARPS) {
    int head = i / (8 * SIDE), d = i % (8 * SIDE);
    const float* from = outs + head * JOIN_STRIDE + d % SIDE * 8 + d / SIDE;
    float value = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) value += from[w * VX_GROUP * JOIN_STRIDE];
    size_t at = (size_t)head * VX_HEAD + base + d;
    if (partial) partial[at] = value;
    else out[at] = from_float<elem>(value * finals[head]);
  }
  __syncthreads();  // the next part comes to the same place
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
paged_decode_mma(const elem* q, kv_elem* k_pages, kv_elem* v_pages, float* k_scales, float* v_scales,
                 const int* __restrict__ items, const int* __restrict__ first_item,
                 const int* __restrict__ positions, const int* __restrict__ block_table,
                 const float* __restrict__ sinks, elem* out, float* partial, float* weights, u32* arrivals,
                 const int* __restrict__ rope_rows, const float* __restrict__ q_norm,
                 const float* __restrict__ k_norm, const float* __restrict__ rope, int tokens, int heads,
                 int kv_heads, int table_stride, int page_shift, int window, float scale, float softcap,
                 int rotary_dim, int interleaved, float eps) {
  VX_DYNAMIC_SHARED(memory);
  __shared__ int arrived;
  vx_wait_for_predecessor();
  if ((int)blockIdx.x < tokens && first_item[blockIdx.x] == first_item[blockIdx.x + 1])
    for (int i = threadIdx.x; i < VX_GROUP * VX_HEAD; i += 32 * WARPS)
      out[((size_t)blockIdx.x * heads + blockIdx.y * VX_GROUP) * VX_HEAD + i] = from_float<elem>(0.f);
  const int4 item = reinterpret_cast<const int4*>(items)[blockIdx.x];
  int token = item.x, begin = item.z, end = item.w;
  if (token < 0) return;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  int head0 = blockIdx.y * VX_GROUP, position = positions[token];
  begin = max(begin, first_seen(position, window));
  if (window > 0) end = min(end, position + window);
  Lines lines = {block_table + (size_t)item.y * table_stride, (u32)(head0 / (heads / kv_heads)),
                 (u32)kv_heads, (u32)page_shift};

  float* tops = reinterpret_cast<float*>(memory);             // (WARPS, VX_GROUP)
  float* sums = tops + WARPS * VX_GROUP;                      // (WARPS, VX_GROUP)
  float* finals = sums + WARPS * VX_GROUP;                    // (VX_GROUP)
  float* outs = tops + 12 * VX_GROUP;                         // (WARPS, VX_GROUP, JOIN_STRIDE)
  uint4* queries = reinterpret_cast<uint4*>(outs);            // (TILES, PIECES, 32), before them
#if VX_STORE
  elem* rows = reinterpret_cast<elem*>(outs + max(WARPS * VX_GROUP * JOIN_STRIDE, TILES * PIECES * 128));
  float* staged = reinterpret_cast<float*>(rows + VX_GROUP * VX_HEAD) + warp * VX_HEAD;
  const elem* heads_in = q + (size_t)token * (heads + 2 * kv_heads) * VX_HEAD;
  bool owns = item.z <= position && position < item.w;
  const float* table = rope ? rope + (size_t)rope_rows[token] * rotary_dim : nullptr;
  for (int h = warp; h < VX_GROUP + (owns ? 2 : 0); h += WARPS) {
    bool is_query = h < VX_GROUP, is_value = h > VX_GROUP;
    int head = is_query ? head0 + h : heads + (int)lines.kv_head + (is_value ? kv_heads : 0);
    size_t line = is_query ? 0 : lines.of(position);
    store_head<STORE_VEC>(heads_in + (size_t)head * VX_HEAD, staged, is_query ? q_norm : is_value ? nullptr : k_norm,
                  {is_value ? nullptr : table, rotary_dim, interleaved, eps},
                  is_query ? rows + h * VX_HEAD : nullptr, (is_value ? v_pages : k_pages) + line * VX_HEAD,
                  (is_value ? v_scales : k_scales) + line);
    __syncwarp();  // the next head comes to the same place
  }
  __syncthreads();
#else
  const elem* rows = q + ((size_t)token * heads + head0) * VX_HEAD;
#endif
  u32 kept[TILES][KEY_PAIRS] = {};
#pragma unroll
  for (int t = 0; KEEP_QUERIES && t < TILES; t++)
    if (group + 8 * t < VX_GROUP) load_key(kept[t], rows + (group + 8 * t) * VX_HEAD, quarter);
  if (!KEEP_QUERIES) {
    for (int i = threadIdx.x; i < TILES * PIECES * 32; i += 32 * WARPS) {
      int head = i / (PIECES * 32) * 8 + i % 32 / 4, d = i / 32 % PIECES * 32 + i % 4 * 8;
      queries[i] = head < VX_GROUP ? *reinterpret_cast<const uint4*>(rows + head * VX_HEAD + d)
                                   : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
  }
  float o[TILES][PAIRS][4] = {}, top[2] = {NOTHING, NOTHING}, sum[2] = {0.f, 0.f};

  for (int first = begin + warp * KEYS; first < end; first += WARPS * KEYS) {
    float s[2][4] = {}, key_scale[2][2], value_scale[2][2];
    u32 keys[2][KEY_PAIRS], values[4][PAIRS];
#pragma unroll
    for (int u = 0; u < 2; u++) {
      u32 line = lines.of(min(first + 8 * u + group, end - 1));
      load_key(keys[u], k_pages + (size_t)line * VX_HEAD, quarter);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {  // keys 2 quarter, the next, and both of the second half
      u32 line = lines.of(min(first + i / 2 * 8 + 2 * quarter + i % 2, end - 1));
      load_value(values[i], v_pages + (size_t)line * VX_HEAD, group);
      key_scale[i / 2][i % 2] = scale, value_scale[i / 2][i % 2] = 1.f;
#if VX_KV_SCALED
      key_scale[i / 2][i % 2] *= k_scales[line], value_scale[i / 2][i % 2] = v_scales[line];
#endif
    }
    score(s, kept, queries, keys);
    to_log2(s, key_scale, softcap);
    float greatest[2] = {top[0], top[1]};
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
      for (int e = 0; e < 2 * TILES; e++) {
        if (first + 8 * u + 2 * quarter + e % 2 >= end) s[u][e] = -VX_INFINITY;
        greatest[e / 2] = fmaxf(greatest[e / 2], s[u][e]);
      }
#pragma unroll
    for (int t = 0; t < TILES; t++) {  // a head is shared by four lanes
      greatest[t] = fmaxf(greatest[t], __shfl_xor_sync(VX_ALL, greatest[t], 1));
      greatest[t] = fmaxf(greatest[t], __shfl_xor_sync(VX_ALL, greatest[t], 2));
      if (!__any_sync(VX_ALL, greatest[t] > top[t])) continue;
      float factor = exp2f(top[t] - greatest[t]);
      top[t] = greatest[t], sum[t] *= factor;
      float even = __shfl_sync(VX_ALL, factor, 8 * quarter);
      float odd = __shfl_sync(VX_ALL, factor, 8 * quarter + 4);
#pragma unroll
      for (int j = 0; j < PAIRS; j++)
        o[t][j][0] *= even, o[t][j][1] *= odd, o[t][j][2] *= even, o[t][j][3] *= odd;
    }
    u32 p[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int u = 0; u < 2; u++) {
        float low = exp2f(s[u][2 * t] - top[t]), high = exp2f(s[u][2 * t + 1] - top[t]);
        sum[t] += low + high;
        p[t][u] = pair_of(low * value_scale[u][0], high * value_scale[u][1]);
      }
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[i] = __byte_perm(values[i / 2 * 2][j], values[i / 2 * 2 + 1][j], i % 2 ? 0x7632 : 0x5410);
#pragma unroll
      for (int t = 0; t < TILES; t++) vx_mma(o[t][j], a, p[t], elem());
    }
  }

#pragma unroll
  for (int t = 0; t < TILES; t++) {
    sum[t] += __shfl_xor_sync(VX_ALL, sum[t], 1);
    sum[t] += __shfl_xor_sync(VX_ALL, sum[t], 2);
    int at = warp * VX_GROUP + group + 8 * t;
    if (quarter == 0 && group + 8 * t < VX_GROUP) tops[at] = top[t], sums[at] = sum[t];
  }
  __syncthreads();
  int first = first_item[token], count = first_item[token + 1] - first;
  bool alone = count == 1;
  size_t row = (size_t)blockIdx.x * heads + head0;
  if (threadIdx.x < VX_GROUP) {
    float best = NOTHING, mass = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) best = fmaxf(best, tops[w * VX_GROUP + threadIdx.x]);
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      mass += sums[w * VX_GROUP + threadIdx.x] * exp2f(tops[w * VX_GROUP + threadIdx.x] - best);
    if (alone) finals[threadIdx.x] = normaliser(sinks, head0 + threadIdx.x, best, mass);
    else weights[2 * (row + threadIdx.x)] = best, weights[2 * (row + threadIdx.x) + 1] = mass;
  }
  float factor[TILES][2];
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int head = min(8 * t + 2 * quarter + e, VX_GROUP - 1);
      float best = NOTHING;
#pragma unroll
      for (int w = 0; w < WARPS; w++) best = fmaxf(best, tops[w * VX_GROUP + head]);
      factor[t][e] = exp2f(tops[warp * VX_GROUP + head] - best);
    }
  elem* answer = out + ((size_t)token * heads + head0) * VX_HEAD;
  float* part = alone ? nullptr : partial + row * VX_HEAD;
#pragma unroll
  for (int c = 0; c < SLABS; c++) join<8>(64 * c, o, factor, outs, finals, answer, part);
  if (VX_HEAD % 64 >= 32) join<4>(64 * SLABS, o, factor, outs, finals, answer, part);
  if (VX_HEAD % 32) join<2>(VX_HEAD - 16, o, factor, outs, finals, answer, part);
  if (alone || !arrives_last(arrivals + (size_t)token * gridDim.y + blockIdx.y, count, &arrived)) return;
  const float* of_items = weights + 2 * ((size_t)first * heads + head0);
  const float* parts = partial + ((size_t)first * heads + head0) * VX_HEAD;
  if (threadIdx.x < VX_GROUP) {
    float best = NOTHING, mass = 0.f;
    for (int i = 0; i < count; i++) best = fmaxf(best, of_items[2 * (i * heads + threadIdx.x)]);
    for (int i = 0; i < count; i++) {
      const float* w = of_items + 2 * (i * heads + threadIdx.x);
      mass += w[1] * exp2f(w[0] - best);
    }
    tops[threadIdx.x] = best, finals[threadIdx.x] = normaliser(sinks, head0 + threadIdx.x, best, mass);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < VX_GROUP * VX_HEAD; i += 32 * WARPS) {
    int head = i / VX_HEAD;
    float value = 0.f;
    for (int n = 0; n < count; n++)
      value += parts[(size_t)n * heads * VX_HEAD + i] * exp2f(of_items[2 * (n * heads + head)] - tops[head]);
    answer[i] = from_float<elem>(value * finals[head]);
  }
}
VX_EXPORT(paged_decode_mma)
