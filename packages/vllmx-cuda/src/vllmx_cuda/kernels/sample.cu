// The sampler: from edited logits to one id a row, as vllmx_core.reference.sampler defines it.
//
// sample_max:  greatest logit and its lowest id in each chunk; NaN where the chunk holds one.
// sample_draw: greatest x + noise in each chunk, of the logits that are no less than the row's threshold.
// sample_pick: one id a row from the chunks; -1 where the row is refused.
// Greedy batches need sample_max and sample_pick alone; between them comes sample_threshold.cu.
//
// Layout: logits (L, V) of f32; chunk results (L, chunks); row parameters (L).
// Grid:   (L, chunks) of 256 threads for max and draw, so that one row alone keeps many SMs busy;
//         (L) of 32 for the pick.
// Floor:  bytes: every logit once in max and draw.
#include "sample_noise.h"
#include "sample_rows.h"
#include "vx.h"

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
sample_max(const float* __restrict__ logits, float* __restrict__ chunk_max,
           int* __restrict__ chunk_argmax, int vocab) {
  __shared__ Best part[32];
  int row = blockIdx.x, first = blockIdx.y * CHUNK, last = min(first + CHUNK, vocab);
  Best best = {-VX_INFINITY, NO_ID};
  for (int id = first + threadIdx.x; id < last; id += CHUNK_THREADS)
    best = better_later(best, logits[(size_t)row * vocab + id], id);
  best = block_best(best, part);
  if (threadIdx.x) return;
  chunk_max[(size_t)row * gridDim.y + blockIdx.y] = best.value;
  chunk_argmax[(size_t)row * gridDim.y + blockIdx.y] = best.id;
}
VX_EXPORT(sample_max)

// ---- draw

#define GROUPS (CHUNK / CHUNK_THREADS / 4)  // of four neighbouring ids, which share Philox words

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
sample_draw(const float* __restrict__ logits, const float* __restrict__ chunk_max,
            const int* __restrict__ chunk_argmax, const float* __restrict__ temperature,
            const float* __restrict__ threshold, const u64* __restrict__ seed,
            const int* __restrict__ position, const int* __restrict__ target,
            float* __restrict__ chunk_score, int* __restrict__ chunk_id, int vocab) {
  __shared__ Best part[32];
  int row = blockIdx.x, first = blockIdx.y * CHUNK, chunks = gridDim.y;
  float greatest = row_best(chunk_max, chunk_argmax, row, chunks).value;
  if (target[row] >= 0 || temperature[row] == 0.f || !is_finite(greatest)) return;
  float score[GROUPS][4], limit = threshold[row], inverse = inverse_of(temperature[row]);
  Best near = {-VX_INFINITY, NO_ID};
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    int id = first + (g * CHUNK_THREADS + threadIdx.x) * 4;
    u32 words[4];
    philox(words, id >> 2, position[row], seed[row]);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      score[g][j] = -VX_INFINITY;
      if (id + j >= vocab) continue;
      float logit = logits[(size_t)row * vocab + id + j];
      if (!(logit >= limit)) continue;  // the threshold is finite, so -inf never stays
      score[g][j] = nearly_tempered(logit, greatest, inverse) + gumbel_near(words[j]);
      Best mine = {score[g][j], id + j};
      near = better(near, mine);
    }
  }
  // whatever could be the greatest is computed once more, exactly
  float top = block_best(near, part).value;
  float least = top - (2.f * GUMBEL_ERROR + 1e-6f * (fabsf(top) + MOST_NOISE));
  Best best = {-VX_INFINITY, NO_ID};
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    int id = first + (g * CHUNK_THREADS + threadIdx.x) * 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (!(score[g][j] >= least) || score[g][j] == -VX_INFINITY) continue;
      u32 words[4];
      philox(words, id >> 2, position[row], seed[row]);
      float x = tempered(logits[(size_t)row * vocab + id + j], greatest, temperature[row]);
      Best mine = {__fadd_rn(x, gumbel(words[j])), id + j};
      best = better(best, mine);
    }
  }
  best = block_best(best, part);
  if (threadIdx.x) return;
  chunk_score[(size_t)row * chunks + blockIdx.y] = best.value;
  chunk_id[(size_t)row * chunks + blockIdx.y] = best.id;
}
VX_EXPORT(sample_draw)

// ---- pick

extern "C" __global__ void __launch_bounds__(32)
sample_pick(const float* __restrict__ chunk_max, const int* __restrict__ chunk_argmax,
            const float* __restrict__ chunk_score, const int* __restrict__ chunk_id,
            const float* __restrict__ temperature, const int* __restrict__ target,
            int* __restrict__ ids, int chunks) {
  int row = blockIdx.x, id = -1;
  Best greatest = row_best(chunk_max, chunk_argmax, row, chunks);
  if (greatest.value < VX_INFINITY) {  // neither NaN nor +inf
    if (target[row] >= 0) {
      id = target[row];
    } else if (greatest.value > -VX_INFINITY) {
      id = temperature[row] == 0.f ? greatest.id
                                   : row_best(chunk_score, chunk_id, row, chunks).id;
    }
  }
  if (threadIdx.x == 0) ids[row] = id;
}
VX_EXPORT(sample_pick)
