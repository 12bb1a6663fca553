// paged_prefill for sm_90a: the same attention on wgmma. Products run by themselves, so the softmax of
// one step is computed while the values of the step before are multiplied (FlashAttention-3, Shah et
// al. 2024, section 3.2).
//
// Layout: as paged_prefill, with its arguments; a tile holds 128 / VX_GROUP tokens. Keys and values
//         are elem, without scales. D is a multiple of 64.
// Grid:   (N, H / VX_GROUP), 256 threads: two warpgroups of 64 query rows each. KEYS keys at a time
//         come by cp.async; keys and values have two stages each, the keys one step ahead of the
//         values. One barrier a step.
// Floor:  4 T C D H / 2 flop (causal); bytes: keys and values once for each tile.
//         With heads of 128 a step of 128 keys is 2,048 cycles of the tensor cores. Its 610 instructions for each of 8
//         warps are 1,220 cycles of four schedulers, the exponentials 1,024 of the MUFU. Maxima, scaling and the
//         barrier, which nothing hides, should be some 500: 80 % of the floor.
#include "attention.h"
#include "vx_hopper.h"

#ifndef VX_HEAD
#define VX_HEAD 128
#endif
#ifndef VX_GROUP
#define VX_GROUP 4
#endif
#define THREADS 256
#define QUERIES 128
#define KEYS (VX_HEAD == 128 ? 128 : 64)
#define COLUMNS (VX_HEAD % 128 == 0 ? 128 : 64)  // of the output that one product computes
#define PARTS (VX_HEAD / COLUMNS)
#define TILE_BYTES(rows) ((rows) * VX_HEAD * 2)
// A step of 16 along the head, and where one chunk of 64 columns follows the other
#define DEPTH_AT(step, rows) ((step) / 4 * (rows) * 128 + (step) % 4 * 32)

struct Pages {
  const elem *keys, *values;
  const int* table;
  int kv_head, kv_heads, page_shift, end;
};
// Query rows of the tile: row i is head head0 + i % VX_GROUP of token token0 + i / VX_GROUP
struct QueryRows {
  int token0, count, head0, heads;
};
struct Softmax {
  float unit;            // from scores to log2
  float softcap, inner;  // 0: none; from scores to the exponent of its tanh, in log2
  float top[2], sum[2];  // of this lane's two query rows
};

VX_DEV u32 pack2(float low, float high) {
  Pack<elem, 2> pack;
  pack.at[0] = from_float<elem>(low), pack.at[1] = from_float<elem>(high);
  return *reinterpret_cast<u32*>(&pack);
}

// One row of D elements by eight threads, a unit of each chunk by each
VX_DEV void load_row(elem* to, const elem* from, int rows) {
#pragma unroll
  for (int chunk = 0; chunk < VX_HEAD / VX_CHUNK; chunk++)
    vx_cp_async16(to + chunk * rows * VX_CHUNK, from + chunk * VX_CHUNK, 16);
}

// Rows `first` and the following of keys or values; beyond the end the last one again, which has no
// weight there, but is finite: what nobody wrote may not be.
VX_DEV void load_rows(elem* to, const elem* from, const Pages& p, int first) {
  int line = threadIdx.x / 8, unit = threadIdx.x % 8 * 8, mask = (1 << p.page_shift) - 1;
#pragma unroll
  for (int row = 0; row < KEYS; row += THREADS / 8) {
    int at = min(first + row + line, p.end - 1);
    u32 page = (u32)p.table[at >> p.page_shift] * p.kv_heads + p.kv_head;
    u32 slot = (page << p.page_shift) + (at & mask);
    load_row(to + vx_swizzled(row + line, unit, KEYS), from + (size_t)slot * VX_HEAD + unit, KEYS);
  }
}

VX_DEV void load_queries(elem* to, const elem* q, const QueryRows& rows) {
  for (int at = threadIdx.x / 8; at < QUERIES; at += THREADS / 8) {
    int unit = threadIdx.x % 8 * 8, token = at / VX_GROUP < rows.count ? at / VX_GROUP : 0;
    size_t line = (size_t)(rows.token0 + token) * rows.heads + rows.head0 + at % VX_GROUP;
    load_row(to + vx_swizzled(at, unit, QUERIES), q + line * VX_HEAD + unit, QUERIES);
  }
}

// S (64 x KEYS) = Q K^T of one warpgroup, under way
VX_DEV void scores(float (&s)[KEYS / 2], u64 queries, u64 keys) {
#pragma unroll
  for (int step = 0; step < VX_HEAD / 16; step++)
    vx_wgmma(s, vx_matrix_at(queries, DEPTH_AT(step, QUERIES)),
             vx_matrix_at(keys, DEPTH_AT(step, KEYS)), step > 0, elem());
  vx_wgmma_commit();
}

// O += P V, under way
VX_DEV void accumulate(float (&o)[PARTS][COLUMNS / 2], const u32 (&p)[KEYS / 16][4], u64 values) {
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++)
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      u32 at = part * COLUMNS / VX_CHUNK * KEYS * 128 + step * 16 * 128;
      vx_wgmma(o[part], p[step], vx_matrix_at(values, at), true, elem());
    }
  vx_wgmma_commit();
}

// Scores become weights, not normalised; what sums so far are to be multiplied by.
VX_DEV void weigh(float (&s)[KEYS / 2], Softmax& m, float (&factor)[2]) {
  float before[2] = {m.top[0], m.top[1]};
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) m.top[i / 2 % 2] = fmaxf(m.top[i / 2 % 2], s[i]);
#pragma unroll
  for (int r = 0; r < 2; r++) {  // a row's columns are shared by a quad of lanes
    m.top[r] = fmaxf(m.top[r], __shfl_xor_sync(VX_ALL, m.top[r], 1));
    m.top[r] = fmaxf(m.top[r], __shfl_xor_sync(VX_ALL, m.top[r], 2));
    factor[r] = vx_exp2((before[r] - m.top[r]) * m.unit);
    m.sum[r] *= factor[r];
  }
  float least[2] = {m.top[0] * m.unit, m.top[1] * m.unit};
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) {
    s[i] = vx_exp2(fmaf(s[i], m.unit, -least[i / 2 % 2]));
    m.sum[i / 2 % 2] += s[i];
  }
}

// Once the products of the step before are done: sums on the scale of the new weights, and these,
// rounded, where they were: the sums of S are the fragments of P. It begins a step, for the compiler
// takes a wait to the front of its block: at the end of one it would come before the softmax.
VX_DEV void take_weights(float (&o)[PARTS][COLUMNS / 2], u32 (&p)[KEYS / 16][4],
                         const float (&s)[KEYS / 2], const float (&factor)[2]) {
  vx_wgmma_wait<0>();
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    vx_wgmma_pin(o[part]);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) o[part][i] *= factor[i / 2 % 2];
  }
#pragma unroll
  for (int i = 0; i < KEYS / 4; i++) p[i / 4][i % 4] = pack2(s[2 * i], s[2 * i + 1]);
}

// What this thread copied, and then what all did, is there for products to read; all are done with
// the stages of the step before.
VX_DEV void stage_arrived() {
  vx_cp_wait<0>();
  vx_fence_async();
  __syncthreads();
}

// The keys that this lane's two query rows see, from `low` to before `high`; all rows of the tile see
// those from `all_low` to before `all_high`
struct Visible {
  int low[2], high[2], all_low, all_high;
};

VX_DEV Visible visible(int position0, int last_position, int end, int window, int causal) {
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  Visible v = {{0, 0}, {end, end}, 0, end};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int position = position0 + (row + 8 * r) / VX_GROUP;
    if (causal) v.high[r] = min(end, position + 1);
    v.low[r] = first_seen(position, window);
    if (window > 0) v.high[r] = min(v.high[r], position + window);
  }
  if (causal) v.all_high = min(end, position0 + 1);
  v.all_low = first_seen(last_position, window);
  if (window > 0) v.all_high = min(v.all_high, position0 + window);
  return v;
}

// Scores of the keys from `first` on: soft-capped, and -infinity where a query does not see a key
VX_DEV void edit_scores(float (&s)[KEYS / 2], const Visible& v, const Softmax& m, int first) {
  if (m.softcap > 0.f) {  // tanh(x) = 1 - 2 / (1 + e^2x), off by 1e-6 at most
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
      s[i] = m.softcap - __fdividef(2.f * m.softcap, 1.f + vx_exp2(s[i] * m.inner));
  }
  if (first >= v.all_low && first + KEYS <= v.all_high) return;
  int column = first + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) {
    int key = column + i / 4 * 8 + i % 2, r = i / 2 % 2;
    if (key < v.low[r] || key >= v.high[r]) s[i] = -VX_INFINITY;
  }
}

VX_DEV void write_out(elem* out, const float (&o)[PARTS][COLUMNS / 2], Softmax& m,
                      const float* sinks, const QueryRows& rows) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    m.sum[r] += __shfl_xor_sync(VX_ALL, m.sum[r], 1);
    m.sum[r] += __shfl_xor_sync(VX_ALL, m.sum[r], 2);
    int at = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r, token = at / VX_GROUP;
    if (token >= rows.count) continue;
    int head = rows.head0 + at % VX_GROUP;
    float inverse = normaliser(sinks, head, m.top[r] * m.unit, m.sum[r]);
    size_t line = (size_t)(rows.token0 + token) * rows.heads + head;
    elem* to = out + line * VX_HEAD + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < VX_HEAD / 8; i++) {
      const float* pair = &o[i * 8 / COLUMNS][i * 8 % COLUMNS / 2 + 2 * r];
      *reinterpret_cast<u32*>(to + i * 8) = pack2(pair[0] * inverse, pair[1] * inverse);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, VX_HEAD == 64 ? 2 : 1)
paged_prefill_wgmma(const elem* __restrict__ q, const elem* __restrict__ k_pages,
                    const elem* __restrict__ v_pages, const float* __restrict__ k_scales,
                    const float* __restrict__ v_scales, const int* __restrict__ tiles,
                    const int* __restrict__ context_len, const int* __restrict__ block_table,
                    const float* __restrict__ sinks, elem* __restrict__ out, int heads,
                    int kv_heads, int table_stride, int page_shift, int window, int causal,
                    float scale, float softcap) {
  VX_DYNAMIC_SHARED_TILES(memory);
  const int4 tile = reinterpret_cast<const int4*>(tiles)[blockIdx.x];
  int row = tile.x, position0 = tile.w, last_position = position0 + tile.z - 1;
  QueryRows rows = {tile.y, tile.z, (int)blockIdx.y * VX_GROUP, heads};
  if (rows.count == 0) return;
  int end = causal ? last_position + 1 : context_len[row];
  int begin = max(0, first_seen(position0, window));  // pages of earlier positions may be gone
  if (window > 0) end = min(end, last_position + window);
  Pages pages = {k_pages, v_pages, block_table + (size_t)row * table_stride,
                 rows.head0 / (heads / kv_heads), kv_heads, page_shift, end};
  Visible seen = visible(position0, last_position, end, window, causal);
  Softmax m = {softcap > 0.f ? LOG2E : scale * LOG2E, softcap, 2.f * LOG2E * scale / softcap,
               {NOTHING, NOTHING}, {0.f, 0.f}};

  elem* queries = reinterpret_cast<elem*>(memory);
  elem* keys = queries + QUERIES * VX_HEAD;  // two stages
  elem* values = keys + 2 * KEYS * VX_HEAD;  // two stages
  load_queries(queries, q, rows);
  load_rows(keys, pages.keys, pages, begin);
  vx_cp_commit();
  u64 of_queries = vx_matrix_descriptor(queries + threadIdx.x / 128 * 64 * VX_CHUNK, 0);
  u64 of_keys = vx_matrix_descriptor(keys, 0);
  u64 of_values = vx_matrix_descriptor(values, KEYS * 128);

  float s[KEYS / 2], o[PARTS][COLUMNS / 2], factor[2];
  u32 p[KEYS / 16][4];
#pragma unroll
  for (int i = 0; i < PARTS * COLUMNS / 2; i++) o[i / (COLUMNS / 2)][i % (COLUMNS / 2)] = 0.f;

  stage_arrived();
  load_rows(values, pages.values, pages, begin);
  if (begin + KEYS < end) load_rows(keys + KEYS * VX_HEAD, pages.keys, pages, begin + KEYS);
  vx_cp_commit();
  vx_wgmma_fence();
  scores(s, of_queries, of_keys);
  vx_wgmma_wait<0>();
  vx_wgmma_pin(s);
  edit_scores(s, seen, m, begin);
  weigh(s, m, factor);

  int stage = 1;  // of the keys at `first`; their values come into the same
  for (int first = begin + KEYS; first < end; first += KEYS, stage ^= 1) {
    take_weights(o, p, s, factor);
    stage_arrived();  // these keys, and the values of the step before
    vx_wgmma_fence();
    scores(s, of_queries, vx_matrix_at(of_keys, stage * TILE_BYTES(KEYS)));
    accumulate(o, p, vx_matrix_at(of_values, (stage ^ 1) * TILE_BYTES(KEYS)));
    load_rows(values + stage * KEYS * VX_HEAD, pages.values, pages, first);
    if (first + KEYS < end)
      load_rows(keys + (stage ^ 1) * KEYS * VX_HEAD, pages.keys, pages, first + KEYS);
    vx_cp_commit();
    vx_wgmma_wait<1>();
    vx_wgmma_pin(s);
    edit_scores(s, seen, m, first);
    weigh(s, m, factor);
  }
  take_weights(o, p, s, factor);
  stage_arrived();
  vx_wgmma_fence();
  accumulate(o, p, vx_matrix_at(of_values, (stage ^ 1) * TILE_BYTES(KEYS)));
  vx_wgmma_wait<0>();
#pragma unroll
  for (int part = 0; part < PARTS; part++) vx_wgmma_pin(o[part]);

  write_out(out, o, m, sinks, rows);
}
VX_EXPORT(paged_prefill_wgmma)
