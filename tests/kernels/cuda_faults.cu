// Kernels with one fault each, for the tests of the emulator's checker.
#include "vx.h"

extern "C" __global__ void __launch_bounds__(64) good(const float* x, float* y, int n) {
  __shared__ float line[64];
  line[threadIdx.x] = x[threadIdx.x % n];
  __syncthreads();
  y[threadIdx.x] = line[63 - threadIdx.x];
}
VX_EXPORT(good)

extern "C" __global__ void __launch_bounds__(64) no_barrier(const float* x, float* y, int n) {
  __shared__ float line[64];
  line[threadIdx.x] = x[threadIdx.x % n];
  y[threadIdx.x] = line[63 - threadIdx.x];
}
VX_EXPORT(no_barrier)

extern "C" __global__ void __launch_bounds__(64) beyond_the_end(const float* x, float* y, int n) {
  y[threadIdx.x] = x[threadIdx.x + 1];
}
VX_EXPORT(beyond_the_end)

extern "C" __global__ void __launch_bounds__(64) writes_input(const float* x, float* y, int n) {
  const_cast<float*>(x)[threadIdx.x] = 0.f;
}
VX_EXPORT(writes_input)

extern "C" __global__ void __launch_bounds__(64) misaligned(const float* x, float* y, int n) {
  if (threadIdx.x < 8) y[threadIdx.x] = reinterpret_cast<const float4*>(x + 1)[threadIdx.x].x;
}
VX_EXPORT(misaligned)

extern "C" __global__ void __launch_bounds__(64) divergent_shuffle(const float* x, float* y, int n) {
  float v = x[threadIdx.x];
  if (threadIdx.x % 32 < 16) v = __shfl_xor_sync(VX_ALL, v, 1);
  y[threadIdx.x] = v;
}
VX_EXPORT(divergent_shuffle)

extern "C" __global__ void __launch_bounds__(64) blocks_collide(const float* x, float* y, int n) {
  y[threadIdx.x] = x[threadIdx.x] + blockIdx.x;
}
VX_EXPORT(blocks_collide)

extern "C" __global__ void __launch_bounds__(64) no_wait(const float* x, float* y, int n) {
  __shared__ __align__(16) float line[256];
  vx_cp_async16(line + 4 * threadIdx.x, x, 16);
  vx_cp_commit();
  y[threadIdx.x] = line[4 * threadIdx.x];
}
VX_EXPORT(no_wait)

extern "C" __global__ void __launch_bounds__(64) divides_by_zero(const float* x, float* y, int n) {
  y[threadIdx.x] = (float)(7 / (n - 64));
}
VX_EXPORT(divides_by_zero)
