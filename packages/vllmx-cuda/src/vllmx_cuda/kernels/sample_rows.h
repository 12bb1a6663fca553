// What the kernels of the sampler share: how a row is cut into chunks, and its greatest logit.
#pragma once
#include "vx.h"

#define CHUNK 8192  // ids that one block looks at; vllmx_cuda.kernel_specs.sampling has the same
#define CHUNK_THREADS 256
#define NO_ID 0x7fffffff
#define LEAST_FLOAT -0x1.fffffep127f

struct Best {
  float value;
  int id;
};

// The greater value; the lower id at a tie. NaN wins over all, so that one is never lost.
VX_DEV Best better(Best a, Best b) {
  if (a.value != a.value) return a;
  if (b.value != b.value) return b;
  return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}
// The same for ids that ascend, when most values are no greater.
VX_DEV Best better_later(Best best, float value, int id) {
  bool wins = !(value <= best.value) && best.value == best.value;
  return {wins ? value : best.value, wins ? id : best.id};
}
VX_DEV Best warp_best(Best best) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) {
    Best other = {__shfl_xor_sync(VX_ALL, best.value, lanes),
                  __shfl_xor_sync(VX_ALL, best.id, lanes)};
    best = better(best, other);
  }
  return best;
}
// Every thread gets it. part: 32 entries of shared memory.
VX_DEV Best block_best(Best best, Best* part) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  best = warp_best(best);
  __syncthreads();
  if (lane == 0) part[warp] = best;
  __syncthreads();
  Best none = {-VX_INFINITY, NO_ID};
  return warp_best(lane < warps ? part[lane] : none);
}

// The best of a row from those of its chunks; every lane of the warp gets it.
VX_DEV Best row_best(const float* values, const int* ids, int row, int chunks) {
  Best best = {-VX_INFINITY, NO_ID};
  for (int c = threadIdx.x % 32; c < chunks; c += 32) {
    Best other = {values[(size_t)row * chunks + c], ids[(size_t)row * chunks + c]};
    best = better(best, other);
  }
  return warp_best(best);
}

VX_DEV bool is_finite(float v) { return v > -VX_INFINITY && v < VX_INFINITY; }

// As vllmx_core.reference.sampler.tempered: the same bits everywhere.
VX_DEV float tempered(float logit, float greatest, float temperature) {
  return __fdiv_rn(__fsub_rn(logit, greatest), temperature);
}

// About the same without a division, and monotone too: for masses, bins and what is made exact afterwards.
VX_DEV float nearly_tempered(float logit, float greatest, float inverse) {
  return __fmul_rn(__fsub_rn(logit, greatest), inverse);
}
VX_DEV float inverse_of(float temperature) { return fminf(1.f / temperature, -LEAST_FLOAT); }
