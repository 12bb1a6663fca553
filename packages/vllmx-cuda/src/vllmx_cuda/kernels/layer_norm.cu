// y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
//
// Layout: x, y (rows, width) of elem; weight, bias (width) of f32, bias may be null. Sums in f32, the
//         variance from centred values in a second pass, so that a large mean costs no digits.
// Grid:   (rows), whole warps that share one row; a thread takes VX_VEC neighbours at a time.
// Floor:  bytes: x once from memory and twice more from L1, y once.
#include "vx.h"

extern "C" __global__ void __launch_bounds__(1024)
layer_norm(const elem* __restrict__ x, const float* __restrict__ weight,
           const float* __restrict__ bias, elem* __restrict__ y, int width, float eps) {
  __shared__ float part[32];
  const elem* row = x + (size_t)blockIdx.x * width;
  elem* out = y + (size_t)blockIdx.x * width;
  float sum = 0.f, squares = 0.f;
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC];
    load(v, row + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) sum += v[j];
  }
  float mean = block_sum(sum, part) / width;
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC];
    load(v, row + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) squares += (v[j] - mean) * (v[j] - mean);
  }
  float scale = rsqrtf(block_sum(squares, part) / width + eps);
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC], w[VX_VEC], b[VX_VEC] = {};
    load(v, row + i);
    load(w, weight + i);
    if (bias) load(b, bias + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) v[j] = (v[j] - mean) * scale * w[j] + b[j];
    store(out + i, v);
  }
}
VX_EXPORT(layer_norm)
