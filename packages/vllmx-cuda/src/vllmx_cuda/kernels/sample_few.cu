// Draws where each row takes at most 64 likeliest ids (top_k): one pass over the logits.
// sample_candidates: the greatest logit of each chunk; of rows that are drawn also a list with all of the chunk's
//                    top_k greatest logits, and a few more.
// sample_among:      one id a row: thresholds and draw among the lists; -1 where the row is refused.
//
// Layout: logits (L, V) of f32; chunk results (L, chunks); lists (L, chunks, 256); row parameters (L). min_x is
//         ln(min_p) as the host rounds it to f32, -inf where off. Fewer than 2^19 ids.
// Grid:   (L, chunks) of 256 threads; (L) of 512.
// Floor:  bytes: every logit once. A thread keeps its 32; some 12 instructions for one.
//
// The m-th greatest of the 32 lanes' maxima is no greater than m logits of a warp: with m of each of the 8 warps
// 8 * m >= top_k logits are no less than the least of these, so that no greater one than it can be missing. Logits
// below may still have the same x as it, and are kept then: it is lowered a little, sample_among looks whether that
// was enough, and reads the whole row where it was not, or where a list was too short.
#include "sample_noise.h"
#include "sample_select.h"
#include "vx.h"

#define EACH (CHUNK / CHUNK_THREADS)

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 3)
sample_candidates(const float* __restrict__ logits, const float* __restrict__ temperature,
                  const int* __restrict__ top_k, const int* __restrict__ target, float* __restrict__ chunk_max,
                  int* __restrict__ chunk_argmax, float* __restrict__ chunk_least, int* __restrict__ listed,
                  float* __restrict__ lists, int* __restrict__ list_ids, int vocab) {
  __shared__ Best part[32];
  __shared__ float parts[CHUNK_THREADS / 32];
  __shared__ int count;
  int row = blockIdx.x, lane = threadIdx.x % 32, first = blockIdx.y * CHUNK + threadIdx.x;
  size_t chunk = (size_t)row * gridDim.y + blockIdx.y;
  float logit[EACH];
  Best best = {-VX_INFINITY, NO_ID};
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    int id = first + j * CHUNK_THREADS;
    logit[j] = id < vocab ? logits[(size_t)row * vocab + id] : -VX_INFINITY;
  }
#pragma unroll
  for (int j = 0; j < EACH; j++) best = better_later(best, logit[j], first + j * CHUNK_THREADS);
  float own = best.value;
  best = block_best(best, part);
  if (threadIdx.x == 0) chunk_max[chunk] = best.value, chunk_argmax[chunk] = best.id, count = 0;
  if (target[row] >= 0 || temperature[row] == 0.f) return;
  int wanted = (top_k[row] + CHUNK_THREADS / 32 - 1) / (CHUNK_THREADS / 32), rank = 0;
#pragma unroll
  for (int l = 0; l < 32; l++) {
    float other = __shfl_sync(VX_ALL, own, l);
    rank += other > own || (other == own && l < lane);
  }
  if (rank == wanted - 1) parts[threadIdx.x / 32] = own;
  __syncthreads();
  float least = parts[0];
#pragma unroll
  for (int w = 1; w < CHUNK_THREADS / 32; w++) least = fminf(least, parts[w]);
  least = fmaxf(least - 1e-5f * fabsf(least), LEAST_FLOAT);
  u32 taken = 0;
#pragma unroll
  for (int j = 0; j < EACH; j++) taken |= (u32)(logit[j] >= least) << j;
  for (; taken; taken &= taken - 1) {
    int id = first + (__ffs(taken) - 1) * CHUNK_THREADS, slot = atomicAdd(&count, 1);
    if (slot >= CANDIDATES) break;
    lists[chunk * CANDIDATES + slot] = logits[(size_t)row * vocab + id];
    list_ids[chunk * CANDIDATES + slot] = id;
  }
  __syncthreads();
  if (threadIdx.x == 0) chunk_least[chunk] = least, listed[chunk] = count;
}
VX_EXPORT(sample_candidates)

// Whether a logit that no list has may be as likely as the limit.
VX_DEV bool may_lack(const float* least, int chunks, Tempering by, u32 limit) {
  bool lacks = false;
  for (int c = threadIdx.x % 32; c < chunks; c += 32) {
    float below = from_order(order_of(least[c]) - 1);
    lacks |= size_of(tempered(below, by.greatest, by.temperature)) <= limit;
  }
  return __any_sync(VX_ALL, lacks);
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1)
sample_among(const float* __restrict__ logits, const float* __restrict__ chunk_max,
             const int* __restrict__ chunk_argmax, const float* __restrict__ chunk_least,
             const int* __restrict__ listed, const float* __restrict__ lists, const int* __restrict__ list_ids,
             const float* __restrict__ temperature, const float* __restrict__ min_x, const int* __restrict__ top_k,
             const float* __restrict__ top_p, const u64* __restrict__ seed, const int* __restrict__ position,
             const int* __restrict__ target, int* __restrict__ ids, int vocab, int chunks) {
  __shared__ Selection s;
  __shared__ Best part[32];
  int row = blockIdx.x, id = -1;
  Best greatest = row_best(chunk_max, chunk_argmax, row, chunks);
  if (target[row] >= 0 || temperature[row] == 0.f || !is_finite(greatest.value)) {
    if (greatest.value < VX_INFINITY && target[row] >= 0) id = target[row];
    else if (is_finite(greatest.value)) id = greatest.id;
    if (threadIdx.x == 0) ids[row] = id;
    return;
  }
  Tempering by = {greatest.value, temperature[row]};
  size_t first = (size_t)row * chunks;
  Source source = {lists + first * CANDIDATES, listed + first, chunks * CANDIDATES};
  bool whole = !all_listed(source.counts, chunks);
  u32 limit;
  for (;;) {
    if (whole) source = {logits + (size_t)row * vocab, nullptr, vocab};
    limit = min(size_of(min_x[row]), MINUS_INFINITY_SIZE - 1);
    limit = limit_of<0>(s, source, by, limit, {0, 0, 0}, top_k[row], 0.f);
    if (whole || !may_lack(chunk_least + first, chunks, by, limit)) break;
    whole = true;
  }
  if (top_p[row] < 1.f) limit = limit_of<1>(s, source, by, limit, {0, 0, 0}, 0, top_p[row]);
  Best best = {-VX_INFINITY, NO_ID};
  each_logit(source, [&](float logit, int i) {
    float x = tempered(logit, by.greatest, by.temperature);
    if (size_of(x) > limit) return;
    Best mine = {0.f, whole ? i : list_ids[first * CANDIDATES + i]};
    u32 words[4];
    philox(words, mine.id >> 2, position[row], seed[row]);
    u32 even = mine.id & 2 ? words[2] : words[0], odd = mine.id & 2 ? words[3] : words[1];
    mine.value = __fadd_rn(x, gumbel(mine.id & 1 ? odd : even));
    best = better(best, mine);
  });
  best = block_best(best, part);
  if (threadIdx.x == 0) ids[row] = best.id;
}
VX_EXPORT(sample_among)
