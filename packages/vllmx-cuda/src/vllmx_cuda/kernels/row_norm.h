// The second half of a norm of rows, which several kernels end with.
#pragma once
#include "vx.h"

// Writes the normalised row; ss is this thread's part of the sum of squares.
VX_DEV void normalise(const elem* row, const float* weight, elem* out, int width, float eps, float ss,
                      float* part) {
  float scale = rsqrtf(block_sum(ss, part) / width + eps);
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC], w[VX_VEC];
    load(v, row + i);
    load(w, weight + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) v[j] *= scale * w[j];
    store(out + i, v);
  }
}
