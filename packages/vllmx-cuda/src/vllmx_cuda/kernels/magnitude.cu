// match_rms: y = x * sqrt(mean(other^2) / max(mean(x^2), floor))
// sparsify:  y = max(x - mean(x) - deviations * std(x), 0)
//
// Layout: x, other, y (rows, width) of elem. Sums in f32, the deviation from centred values in a second pass.
// Grid:   (rows), whole warps that share one row; a thread takes VX_VEC neighbours at a time.
// Floor:  bytes: x and other once from memory, x once or twice more from L1, y once.
#include "vx.h"

VX_DEV float mean_square(const elem* row, int width, float mean, float* part) {
  float squares = 0.f;
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC];
    load(v, row + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) squares += (v[j] - mean) * (v[j] - mean);
  }
  return block_sum(squares, part) / width;
}

extern "C" __global__ void __launch_bounds__(1024)
match_rms(const elem* __restrict__ x, const elem* __restrict__ other, elem* __restrict__ y, int width, float floor) {
  __shared__ float part[32];
  size_t at = (size_t)blockIdx.x * width;
  float given = mean_square(x + at, width, 0.f, part), wanted = mean_square(other + at, width, 0.f, part);
  float factor = sqrtf(wanted / (given < floor ? floor : given));
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC];
    load(v, x + at + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) v[j] *= factor;
    store(y + at + i, v);
  }
}
VX_EXPORT(match_rms)

extern "C" __global__ void __launch_bounds__(1024)
sparsify(const elem* __restrict__ x, elem* __restrict__ y, int width, float deviations) {
  __shared__ float part[32];
  size_t at = (size_t)blockIdx.x * width;
  float sum = 0.f;
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC];
    load(v, x + at + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) sum += v[j];
  }
  float mean = block_sum(sum, part) / width;
  float cutoff = mean + deviations * sqrtf(mean_square(x + at, width, mean, part));
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC];
    load(v, x + at + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) v[j] = v[j] < cutoff ? 0.f : v[j] - cutoff;
    store(y + at + i, v);
  }
}
VX_EXPORT(sparsify)
