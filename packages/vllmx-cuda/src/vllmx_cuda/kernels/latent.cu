// Multi-head latent attention over pages that hold one row a token for all heads: the normed latent (C values) and the
// rotated key part (Dr). Queries come absorbed: heads_gemv has brought them into the space of the latents.
//
// latent_store:   norms and rotates what is kept of each token, writes it to its page, and rotates the queries' second
//                 part into place behind the absorbed one.
// latent_decode:  one work item = one query token and one range of positions, for 8 heads (see paged_decode.cu).
//                 With `picked` (T, K) an item is the same share of the positions that its token picked.
// latent_combine: joins the items of each token.
//
// Layout: latent (T, C + Dr), q (T, H, Dn + Dr), queries (T, H, C + Dr), out (T, H, C) of elem; norm (C), rope
//         (positions, Dr: cos, then sin) of f32; pages (blocks, P, C + Dr) of elem; slots, positions, items, first_item,
//         block_table, partial (N, H, C), weights (N, H, 2): as in paged_decode.cu.
// Grid:   store: (T, 1 + H), 128 threads, the first block of a token for its row, the others for its queries.
//         decode: (N, ceil(H / 8)), 256 threads; a thread has every 256th value of C for all heads, so a row is read
//         from memory once for 8 heads. combine: (T, H), 128 threads.
// Floor:  bytes of the pages, once for every 8 heads.
#include "attention.h"
#include "vx.h"

#define THREADS 256
#define WARPS (THREADS / 32)
#define HEADS 8
#define CHUNK 32   // positions between two looks at the maxima
#define SHARES 4   // values of C that a thread may have: up to 1,024

VX_DEV void rotate(elem* out, const elem* in, const float* table, int rotary, int interleaved) {
  int half = rotary / 2;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    int first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
    float a = to_float(in[first]), b = to_float(in[second]), cosine = table[i], sine = table[half + i];
    out[first] = from_float<elem>(a * cosine - b * sine);
    out[second] = from_float<elem>(b * cosine + a * sine);
  }
}

extern "C" __global__ void __launch_bounds__(128)
latent_store(const elem* __restrict__ latent, const elem* __restrict__ q, const int* __restrict__ positions,
             const int* __restrict__ slots, const float* __restrict__ norm, const float* __restrict__ rope,
             elem* __restrict__ queries, elem* __restrict__ pages, int heads, int rank, int nope, int rotary,
             int interleaved, float eps) {
  __shared__ float part[32];
  int token = blockIdx.x, head = blockIdx.y - 1, row = rank + rotary;
  const float* table = rope + (size_t)positions[token] * rotary;
  if (head >= 0) {
    size_t at = (size_t)token * heads + head;
    rotate(queries + at * row + rank, q + at * (nope + rotary) + nope, table, rotary, interleaved);
    return;
  }
  int slot = slots[token];
  if (slot < 0) return;
  const elem* in = latent + (size_t)token * row;
  elem* out = pages + (size_t)slot * row;
  float squares = 0.f;
  for (int i = threadIdx.x; i < rank; i += 128) squares += to_float(in[i]) * to_float(in[i]);
  float scale = rsqrtf(block_sum(squares, part) / rank + eps);
  for (int i = threadIdx.x; i < rank; i += 128) out[i] = from_float<elem>(to_float(in[i]) * scale * norm[i]);
  rotate(out + rank, in + rank, table, rotary, interleaved);
}
VX_EXPORT(latent_store)

struct Found {
  float out[HEADS][SHARES];
};

// The row of position `index`, or of the one that was picked there
VX_DEV const elem* row_at(const elem* pages, const int* table, const int* picks, int index, int page_shift, int row) {
  int position = picks ? picks[index] : index;
  size_t slot = ((size_t)table[position >> page_shift] << page_shift) + (position & ((1 << page_shift) - 1));
  return pages + slot * row;
}

// Scores of CHUNK positions for `count` heads in units of log2: a warp takes every 8th position
VX_DEV void score(float (*scores)[CHUNK], const float* queries, const elem* pages, const int* table, const int* picks,
                  int base, int end, int page_shift, int row, int count, float scale) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int p = warp; p < CHUNK; p += WARPS) {
    float dots[HEADS] = {};
    if (base + p < end) {
      const elem* key = row_at(pages, table, picks, base + p, page_shift, row);
      for (int i = lane; i < row; i += 32) {
        float v = to_float(key[i]);
#pragma unroll
        for (int h = 0; h < HEADS; h++) dots[h] += v * queries[h * row + i];
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      if (h >= count) continue;
      float dot = warp_sum(dots[h]);
      if (lane == 0) scores[h][p] = base + p < end ? to_log2(dot * scale, 0.f) : -VX_INFINITY;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
latent_decode(const elem* __restrict__ queries, const elem* __restrict__ pages, const int* __restrict__ items,
              const int* __restrict__ first_item, const int* __restrict__ block_table, elem* __restrict__ out,
              float* __restrict__ partial, float* __restrict__ weights, int heads, int rank, int rotary,
              int table_stride, int page_shift, float scale, const int* __restrict__ positions,
              const int* __restrict__ picked, int num_picked) {
  VX_DYNAMIC_SHARED(memory);
  __shared__ float scores[HEADS][CHUNK], tops[HEADS], sums[HEADS], factors[HEADS];
  const int4 item = reinterpret_cast<const int4*>(items)[blockIdx.x];
  int token = item.x, begin = item.z, end = item.w, row = rank + rotary, head0 = blockIdx.y * HEADS;
  int count = min(HEADS, heads - head0);
  if (token < 0) return;
  const int* table = block_table + (size_t)item.y * table_stride;
  const int* picks = picked ? picked + (size_t)token * num_picked : nullptr;
  if (picks) {  // the item's share of the positions becomes that of the picks
    long long seen = positions[token] + 1, count = min((int)seen, num_picked);
    begin = begin * count / seen, end = end * count / seen;
  }
  float* query = reinterpret_cast<float*>(memory);  // (HEADS, row)
  for (int i = threadIdx.x; i < HEADS * row; i += THREADS) {
    int head = head0 + i / row;
    query[i] = head < heads ? to_float(queries[((size_t)token * heads + head) * row + i % row]) : 0.f;
  }
  if (threadIdx.x < HEADS) tops[threadIdx.x] = NOTHING, sums[threadIdx.x] = 0.f, factors[threadIdx.x] = 0.f;
  for (int i = threadIdx.x; i < HEADS * CHUNK; i += THREADS) scores[i / CHUNK][i % CHUNK] = 0.f;
  __syncthreads();

  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Found now = {};
  for (int base = begin; base < end; base += CHUNK) {
    score(scores, query, pages, table, picks, base, end, page_shift, row, count, scale);
    __syncthreads();
    if (warp < count) {  // a warp a head
      float own = scores[warp][lane], before = tops[warp], top = fmaxf(before, warp_max(own));
      float weight = exp2f(own - top), sum = warp_sum(weight);
      scores[warp][lane] = weight;
      __syncwarp();
      if (lane == 0) {
        factors[warp] = exp2f(before - top);
        sums[warp] = sums[warp] * factors[warp] + sum;
        tops[warp] = top;
      }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
      for (int s = 0; s < SHARES; s++) now.out[h][s] *= factors[h];
    for (int p = 0; p < min(CHUNK, end - base); p++) {
      const elem* value = row_at(pages, table, picks, base + p, page_shift, row);
#pragma unroll
      for (int s = 0; s < SHARES; s++) {
        int c = threadIdx.x + s * THREADS;
        float v = c < rank ? to_float(value[c]) : 0.f;
#pragma unroll
        for (int h = 0; h < HEADS; h++) now.out[h][s] += scores[h][p] * v;
      }
    }
    __syncthreads();  // scores are written again
  }
  bool alone = first_item[token + 1] - first_item[token] == 1;
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    int head = head0 + h;
    if (h >= count) continue;
    size_t at = alone ? (size_t)token * heads + head : (size_t)blockIdx.x * heads + head;
    float factor = alone ? normaliser(nullptr, head, tops[h], sums[h]) : 1.f;
#pragma unroll
    for (int s = 0; s < SHARES; s++) {
      int c = threadIdx.x + s * THREADS;
      if (c >= rank) continue;
      float v = now.out[h][s] * factor;
      if (alone) {
        out[at * rank + c] = from_float<elem>(v);
      } else {
        partial[at * rank + c] = v;
      }
    }
    if (!alone && threadIdx.x == 0) weights[2 * at] = tops[h], weights[2 * at + 1] = sums[h];
  }
}
VX_EXPORT(latent_decode)

extern "C" __global__ void __launch_bounds__(128)
latent_combine(const float* __restrict__ partial, const float* __restrict__ weights,
               const int* __restrict__ first_item, elem* __restrict__ out, int heads, int rank) {
  int token = blockIdx.x, head = blockIdx.y, first = first_item[token], last = first_item[token + 1];
  if (last - first == 1) return;  // latent_decode has written the answer
  float top = NOTHING, sum = 0.f;
  for (int i = first; i < last; i++) top = fmaxf(top, weights[2 * ((size_t)i * heads + head)]);
  for (int i = first; i < last; i++) {
    const float* w = weights + 2 * ((size_t)i * heads + head);
    sum += w[1] * exp2f(w[0] - top);
  }
  float scale = normaliser(nullptr, head, top, sum);
  for (int c = threadIdx.x; c < rank; c += 128) {
    float acc = 0.f;
    for (int i = first; i < last; i++) {
      size_t at = (size_t)i * heads + head;
      acc += partial[at * rank + c] * exp2f(weights[2 * at] - top);
    }
    out[((size_t)token * heads + head) * rank + c] = from_float<elem>(acc * scale);
  }
}
VX_EXPORT(latent_combine)
