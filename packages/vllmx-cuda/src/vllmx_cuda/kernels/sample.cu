// The sampler: from edited logits to one id a row, as vllmx_core.reference.sampler defines it.
//
// sample_max:       greatest logit and its lowest id in each chunk; NaN where the chunk holds one.
// sample_threshold: the least tempered logit that min_p, top_k and top_p leave.
// sample_draw:      greatest x + noise in each chunk, of what is left.
// sample_pick:      one id a row from the chunks; -1 where the row is refused.
// Greedy batches need sample_max and sample_pick alone.
//
// Layout: logits (L, V) of f32; chunk results (L, chunks); row parameters (L). min_x is ln(min_p) as
//         the host rounds it to f32, -inf where off.
// Grid:   (L, chunks) of 256 threads for max and draw, so that one row alone keeps many SMs busy;
//         (L) of 1024 for the threshold, (L) of 32 for the pick.
// Floor:  bytes: every logit once in max and draw, four times from L2 for each of top_k and top_p.
//
// No sort: the threshold is found by a radix select over x, on counts for top_k, on masses for
// top_p. Masses are integers, exp(x) * 2^40, so that sums do not depend on the order of atomics.
#include "sample_noise.h"
#include "sample_rows.h"
#include "vx.h"

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
sample_max(const float* __restrict__ logits, float* __restrict__ chunk_max,
           int* __restrict__ chunk_argmax, int vocab) {
  __shared__ Best part[32];
  int row = blockIdx.x, first = blockIdx.y * CHUNK, last = min(first + CHUNK, vocab);
  Best best = {-VX_INFINITY, NO_ID};
  for (int id = first + threadIdx.x; id < last; id += CHUNK_THREADS) {
    Best mine = {logits[(size_t)row * vocab + id], id};
    best = better(best, mine);
  }
  best = block_best(best, part);
  if (threadIdx.x) return;
  chunk_max[(size_t)row * gridDim.y + blockIdx.y] = best.value;
  chunk_argmax[(size_t)row * gridDim.y + blockIdx.y] = best.id;
}
VX_EXPORT(sample_max)

// ---- threshold

#define BINS 2048
#define THRESHOLD_THREADS 1024
#define MINUS_INFINITY_SIZE 0x7f800000u

// x is 0 at most, so the bits of its magnitude order it: the smaller, the likelier.
VX_DEV u32 size_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }
VX_DEV u64 mass_of(float x) { return (u64)(expf(x) * 0x1p40f); }

// Which bin a magnitude falls into in each of four passes. The first goes by value, because logits
// crowd into few exponents; the others by 10 bits each of those that fell into the same first bin.
VX_DEV u32 bin_of(u32 size, int pass) {
  if (pass == 0) return (u32)fminf(__uint_as_float(size) * 64.f, BINS - 1.f);
  return size >> (30 - 10 * pass) & (pass == 1 ? 2047u : 1023u);
}

struct Selection {
  u64 bins[BINS];
  u64 warp_sums[32];
  u32 bin;      // where the sum reached the target
  u64 before;   // the sum of all bins before it
  u64 total;
};

// Sets bin, before and total of the selection; bin is BINS where the target is not reached.
VX_DEV void find_bin(Selection& s, u64 target) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 a = s.bins[2 * threadIdx.x], b = s.bins[2 * threadIdx.x + 1], sum = a + b;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) {
    u64 other = __shfl_up_sync(VX_ALL, sum, lanes);
    if (lane >= lanes) sum += other;
  }
  if (lane == 31) s.warp_sums[warp] = sum;
  if (threadIdx.x == 0) s.bin = BINS;
  __syncthreads();
  u64 before = sum - a - b, total = 0;
  for (int w = 0; w < 32; w++) {
    if (w < warp) before += s.warp_sums[w];
    total += s.warp_sums[w];
  }
  if (threadIdx.x == 0) s.total = total;
  if (before < target && target <= before + a + b) {
    bool second = target > before + a;
    s.bin = 2 * threadIdx.x + second, s.before = before + (second ? a : 0);
  }
  __syncthreads();
}

// The magnitude at which the weights of all x no less reach the target; `limit` where they do not.
// WEIGHT 0: counts, target is a number of ids. WEIGHT 1: masses, share is a share of all of it.
template <int WEIGHT>
VX_DEV u32 limit_of(Selection& s, const float* line, int vocab, float greatest, float temperature,
                  u32 limit, u64 target, float share) {
  u32 first_bin = 0, prefix = 0;
  for (int pass = 0; pass < 4; pass++) {
    s.bins[threadIdx.x] = s.bins[threadIdx.x + THRESHOLD_THREADS] = 0;
    __syncthreads();
    for (int id = threadIdx.x; id < vocab; id += THRESHOLD_THREADS) {
      float x = tempered(line[id], greatest, temperature);
      u32 size = size_of(x);
      if (size > limit) continue;
      if (pass > 0 && bin_of(size, 0) != first_bin) continue;
      if (pass > 1 && size >> (40 - 10 * pass) != prefix) continue;
      atomicAdd(&s.bins[bin_of(size, pass)], WEIGHT ? mass_of(x) : (u64)1);
    }
    __syncthreads();
    if (WEIGHT && pass == 0) {
      find_bin(s, 0);  // for the total
      double wanted = ceil((double)share * (double)s.total);
      target = max((u64)wanted, (u64)1);
    }
    find_bin(s, target);
    if (s.bin == BINS) return limit;
    if (pass == 0) first_bin = s.bin;
    else if (pass == 1) prefix = s.bin;
    else prefix = prefix << 10 | s.bin;
    target -= s.before;
  }
  return prefix;
}

extern "C" __global__ void __launch_bounds__(THRESHOLD_THREADS, 1)
sample_threshold(const float* __restrict__ logits, const float* __restrict__ chunk_max,
                 const int* __restrict__ chunk_argmax, const float* __restrict__ temperature,
                 const float* __restrict__ min_x, const int* __restrict__ top_k,
                 const float* __restrict__ top_p, const int* __restrict__ target,
                 float* __restrict__ threshold, int vocab, int chunks) {
  __shared__ Selection selection;
  int row = blockIdx.x;
  float greatest = row_best(chunk_max, chunk_argmax, row, chunks).value;
  bool finite = greatest > -VX_INFINITY && greatest < VX_INFINITY;
  if (target[row] >= 0 || temperature[row] == 0.f || !finite) return;
  const float* line = logits + (size_t)row * vocab;
  u32 limit = min(size_of(min_x[row]), MINUS_INFINITY_SIZE - 1);
  if (top_k[row] > 0)
    limit = limit_of<0>(selection, line, vocab, greatest, temperature[row], limit, top_k[row], 0.f);
  if (top_p[row] < 1.f)
    limit = limit_of<1>(selection, line, vocab, greatest, temperature[row], limit, 0, top_p[row]);
  if (threadIdx.x == 0) threshold[row] = -__uint_as_float(limit);
}
VX_EXPORT(sample_threshold)

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
  bool finite = greatest > -VX_INFINITY && greatest < VX_INFINITY;
  if (target[row] >= 0 || temperature[row] == 0.f || !finite) return;
  float score[GROUPS][4], limit = threshold[row];
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
      float x = tempered(logits[(size_t)row * vocab + id + j], greatest, temperature[row]);
      if (x < limit) continue;  // the threshold is finite, so -inf never stays
      score[g][j] = x + gumbel_near(words[j]);
      Best mine = {score[g][j], id + j};
      near = better(near, mine);
    }
  }
  // whatever could be the greatest is computed once more, exactly
  float top = block_best(near, part).value;
  float least = top - (2.f * GUMBEL_ERROR + 1e-6f * fabsf(top));
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
  int row = blockIdx.x;
  if (threadIdx.x) return;
  Best greatest = row_best(chunk_max, chunk_argmax, row, chunks);
  int id = -1;
  if (greatest.value < VX_INFINITY) {  // neither NaN nor +inf
    if (target[row] >= 0) {
      id = target[row];
    } else if (greatest.value > -VX_INFINITY) {
      id = temperature[row] == 0.f ? greatest.id
                                   : row_best(chunk_score, chunk_id, row, chunks).id;
    }
  }
  ids[row] = id;
}
VX_EXPORT(sample_pick)
