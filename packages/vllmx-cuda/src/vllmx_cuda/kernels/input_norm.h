// RMS norms that a product takes of its own x, with VX_NORM 1: the sums of squares come from the product that
// wrote x (Added in outputs.h), and each fragment of x is scaled and rounded as rms_norm.cu would have stored it.
#pragma once
#include "vx.h"

#ifndef VX_NORM
#define VX_NORM 0
#endif

// squares (M, count): parts of the sum of each token's squares
struct Norm {
  const float *weight, *squares;
  int count;
  float eps;
};

#if VX_NORM
// The factors of the tokens from token0 on, of m: for all threads of the block
template <int TOKENS> VX_DEV void norm_scales(float (&scales)[TOKENS], const Norm& norm, int token0, int m, int width) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int t = warp; t < TOKENS; t += warps) {
    const float* squares = norm.squares + (size_t)min(token0 + t, m - 1) * norm.count;
    float sum = 0.f;
    for (int i = lane; i < norm.count; i += 32) sum += squares[i];
    sum = warp_sum(sum);
    if (lane == 0) scales[t] = rsqrtf(sum / width + norm.eps);
  }
  __syncthreads();
}

// Two neighbours of x, normalised
VX_DEV u32 normed_pair(u32 x, float scale, float first, float second) {
  Pack<elem, 2> pack = *reinterpret_cast<Pack<elem, 2>*>(&x);
  pack.at[0] = from_float<elem>(to_float(pack.at[0]) * (scale * first));
  pack.at[1] = from_float<elem>(to_float(pack.at[1]) * (scale * second));
  return *reinterpret_cast<u32*>(&pack);
}
VX_DEV uint4 normed(const uint4& x, float scale, const float (&weight)[8]) {
  return make_uint4(normed_pair(x.x, scale, weight[0], weight[1]), normed_pair(x.y, scale, weight[2], weight[3]),
                    normed_pair(x.z, scale, weight[4], weight[5]), normed_pair(x.w, scale, weight[6], weight[7]));
}
#endif
