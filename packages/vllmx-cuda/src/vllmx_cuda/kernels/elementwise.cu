// add:     z = x + y
// scale:   y = x * factor
// softcap: logits = cap * tanh(logits / cap), in place, of f32
//
// Layout: flat arrays of `count` elements; z may be x or y, y may be x.
// Grid:   (ceil(count / (256 * VX_VEC))), 256 threads, VX_VEC neighbours each.
// Floor:  bytes: each input read once, the output written once.
#include "vx.h"

VX_DEV u64 first_of_thread() { return ((u64)blockIdx.x * 256 + threadIdx.x) * VX_VEC; }

extern "C" __global__ void __launch_bounds__(256)
add(const elem* x, const elem* y, elem* z, u64 count) {
  u64 i = first_of_thread();
  if (i >= count) return;
  float a[VX_VEC], b[VX_VEC];
  load(a, x + i);
  load(b, y + i);
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) a[j] += b[j];
  store(z + i, a);
}
VX_EXPORT(add)

extern "C" __global__ void __launch_bounds__(256)
scale(const elem* x, elem* y, u64 count, float factor) {
  u64 i = first_of_thread();
  if (i >= count) return;
  float v[VX_VEC];
  load(v, x + i);
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) v[j] *= factor;
  store(y + i, v);
}
VX_EXPORT(scale)

extern "C" __global__ void __launch_bounds__(256) softcap(float* logits, u64 count, float cap) {
  u64 i = first_of_thread();
  if (i >= count) return;
  float v[VX_VEC];
  load(v, logits + i);
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) v[j] = cap * tanhf(v[j] / cap);
  store(logits + i, v);
}
VX_EXPORT(softcap)
