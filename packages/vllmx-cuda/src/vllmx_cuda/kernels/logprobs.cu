// Log-probabilities of the logits as computed, for the rows that want them.
//
// logprob_chunks: of each chunk the greatest logit, the sum of exp(logit - greatest), and the `width`
//                 likeliest ids in order.
// logprob_rows:   joins the chunks; the chosen id's log-probability and rank.
//
// Layout: logits (L, V) of f32; chunk results (L, chunks) and (L, chunks, width); num_logprobs (L), -1:
//         not wanted; ids (L) as sampled, -1: refused; chosen, rank (L); top_ids, top (L, width).
// Grid:   (L, chunks) of 256 threads with the chunk in shared memory; (L) of 256.
// Floor:  bytes: every logit of a row that wants them twice.
#include "sample_rows.h"
#include "vx.h"

// Comes a after b in the order of likelihood? Ties go by id.
VX_DEV bool after(Best a, Best b) { return a.value < b.value || (a.value == b.value && a.id > b.id); }

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
logprob_chunks(const float* __restrict__ logits, const int* __restrict__ num_logprobs,
               float* __restrict__ chunk_max, float* __restrict__ chunk_sum,
               float* __restrict__ chunk_top, int* __restrict__ chunk_top_ids, int vocab,
               int width) {
  __shared__ float line[CHUNK];
  __shared__ Best part[32];
  __shared__ float sums[32];
  int row = blockIdx.x, first = blockIdx.y * CHUNK, count = min(CHUNK, vocab - first);
  int wanted = num_logprobs[row];
  if (wanted < 0) return;
  Best last = {VX_INFINITY, -1};
  float greatest = -VX_INFINITY, sum = 0.f;
  for (int i = threadIdx.x; i < count; i += CHUNK_THREADS) {
    line[i] = logits[(size_t)row * vocab + first + i];
    greatest = fmaxf(greatest, line[i]);
  }
  Best mine = {greatest, (int)threadIdx.x};
  greatest = block_best(mine, part).value;  // its barriers also publish the line
  if (greatest > -VX_INFINITY)
    for (int i = threadIdx.x; i < count; i += CHUNK_THREADS) sum += expf(line[i] - greatest);
  sum = block_sum(sum, sums);
  size_t chunk = (size_t)row * gridDim.y + blockIdx.y;
  if (threadIdx.x == 0) chunk_max[chunk] = greatest, chunk_sum[chunk] = sum;
  for (int k = 0; k < wanted; k++) {
    Best next = {-VX_INFINITY, NO_ID};
    for (int i = threadIdx.x; i < count; i += CHUNK_THREADS) {
      Best candidate = {line[i], first + i};
      if (after(candidate, last)) next = better(next, candidate);
    }
    last = block_best(next, part);
    if (threadIdx.x) continue;
    chunk_top[chunk * width + k] = last.value;
    chunk_top_ids[chunk * width + k] = last.id;
  }
}
VX_EXPORT(logprob_chunks)

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
logprob_rows(const float* __restrict__ logits, const int* __restrict__ num_logprobs,
             const int* __restrict__ ids, const float* __restrict__ chunk_max,
             const float* __restrict__ chunk_sum, const float* __restrict__ chunk_top,
             const int* __restrict__ chunk_top_ids, float* __restrict__ chosen,
             int* __restrict__ rank, int* __restrict__ top_ids, float* __restrict__ top, int vocab,
             int chunks, int width) {
  __shared__ Best part[32];
  __shared__ float sums[32];
  int row = blockIdx.x, id = ids[row], wanted = id < 0 ? -1 : num_logprobs[row];
  for (int k = max(wanted, 0) + threadIdx.x; k < width; k += CHUNK_THREADS)
    top_ids[row * width + k] = -1, top[row * width + k] = -VX_INFINITY;
  if (wanted < 0) {
    if (threadIdx.x == 0) chosen[row] = -VX_INFINITY, rank[row] = 0;
    return;
  }
  float greatest = -VX_INFINITY, sum = 0.f;
  for (int c = 0; c < chunks; c++)
    greatest = fmaxf(greatest, chunk_max[(size_t)row * chunks + c]);
  for (int c = 0; c < chunks; c++) {
    size_t chunk = (size_t)row * chunks + c;
    if (chunk_max[chunk] > -VX_INFINITY) sum += chunk_sum[chunk] * expf(chunk_max[chunk] - greatest);
  }
  float log_mass = logf(sum), logit = logits[(size_t)row * vocab + id];

  float greater = 0.f;  // a count; exact in f32 up to 2^24 ids
  for (int i = threadIdx.x; i < vocab; i += CHUNK_THREADS)
    greater += logits[(size_t)row * vocab + i] > logit ? 1.f : 0.f;
  greater = block_sum(greater, sums);
  if (threadIdx.x == 0)
    chosen[row] = (logit - greatest) - log_mass, rank[row] = 1 + (int)greater;

  Best last = {VX_INFINITY, -1};
  for (int k = 0; k < wanted; k++) {
    Best next = {-VX_INFINITY, NO_ID};
    for (int i = threadIdx.x; i < chunks * wanted; i += CHUNK_THREADS) {
      size_t at = ((size_t)row * chunks + i / wanted) * width + i % wanted;
      Best candidate = {chunk_top[at], chunk_top_ids[at]};
      if (candidate.id != NO_ID && after(candidate, last)) next = better(next, candidate);
    }
    last = block_best(next, part);
    if (threadIdx.x) continue;
    bool found = last.id != NO_ID;  // the vocabulary may be smaller than k
    top_ids[row * width + k] = found ? last.id : -1;
    top[row * width + k] = found ? (last.value - greatest) - log_mass : -VX_INFINITY;
  }
}
VX_EXPORT(logprob_rows)
