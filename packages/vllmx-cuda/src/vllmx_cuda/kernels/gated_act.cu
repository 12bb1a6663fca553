// gated_act:  y = act(gate) * up, of gate_up = gate | up
// activation: y = act(x)
//
// Layout: gate_up (T, 2F), x and y (T, F) of elem.
// Grid:   (T, ceil(F / (256 * VX_VEC))), 256 threads, VX_VEC neighbours each.
// Floor:  bytes: each input read once, the output written once.
#include "activation.h"
#include "vx.h"

extern "C" __global__ void __launch_bounds__(256)
gated_act(const elem* __restrict__ gate_up, elem* __restrict__ y, int width) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  const elem* row = gate_up + (size_t)blockIdx.x * 2 * width;
  float gate[VX_VEC], up[VX_VEC];
  load(gate, row + i);
  load(up, row + width + i);
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) gate[j] = activated(gate[j]) * up[j];
  store(y + (size_t)blockIdx.x * width + i, gate);
}
VX_EXPORT(gated_act)

extern "C" __global__ void __launch_bounds__(256)
activation(const elem* __restrict__ x, elem* __restrict__ y, int width) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  float v[VX_VEC];
  load(v, x + (size_t)blockIdx.x * width + i);
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) v[j] = activated(v[j]);
  store(y + (size_t)blockIdx.x * width + i, v);
}
VX_EXPORT(activation)
