// rms_norm:     y = x / sqrt(mean(x^2) + eps) * weight
// add_rms_norm: residual += x, y = rms_norm(residual); what is normalised is the rounded sum, as the
//               next layer will see it.
//
// Layout: x, residual, y (rows, width) of elem; weight (width) of f32. Sums in f32.
// Grid:   (rows), whole warps that share one row; a thread takes VX_VEC neighbours at a time.
// Floor:  bytes: rms_norm 2 passes over x, of which the second comes from L1; add_rms_norm reads x
//         and residual once, writes residual and y once, and re-reads its own sum from L1.
#include "row_norm.h"

extern "C" __global__ void __launch_bounds__(1024)
rms_norm(const elem* __restrict__ x, const float* __restrict__ weight, elem* __restrict__ y,
         int width, float eps) {
  __shared__ float part[32];
  const elem* row = x + (size_t)blockIdx.x * width;
  float ss = 0.f;
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC];
    load(v, row + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) ss += v[j] * v[j];
  }
  normalise(row, weight, y + (size_t)blockIdx.x * width, width, eps, ss, part);
}
VX_EXPORT(rms_norm)

extern "C" __global__ void __launch_bounds__(1024)
add_rms_norm(const elem* __restrict__ x, elem* residual, const float* __restrict__ weight,
             elem* __restrict__ y, int width, float eps) {
  __shared__ float part[32];
  const elem* row = x + (size_t)blockIdx.x * width;
  elem* sum = residual + (size_t)blockIdx.x * width;
  float ss = 0.f;
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float a[VX_VEC], b[VX_VEC];
    load(a, row + i);
    load(b, sum + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) {
      a[j] = to_float(from_float<elem>(a[j] + b[j]));
      ss += a[j] * a[j];
    }
    store(sum + i, a);
  }
  // each thread reads back only what it wrote itself
  normalise(sum, weight, y + (size_t)blockIdx.x * width, width, eps, ss, part);
}
VX_EXPORT(add_rms_norm)
