// gate: y = x * act(g), a gate for each `span` neighbouring features.
//
// Layout: x, y (T, F), g (T, F / span) of elem, or of f32 where VX_WIDE is 1. With a span above 1, VX_VEC divides it, so that the features of a
//         thread share their gate.
// Grid:   (T, ceil(F / (256 * VX_VEC))), 256 threads, VX_VEC neighbours each.
// Floor:  bytes: each input read once, the output written once.
#include "activation.h"
#include "vx.h"

#if VX_WIDE
using gate_elem = float;
#else
using gate_elem = elem;
#endif

extern "C" __global__ void __launch_bounds__(256)
gate(const elem* __restrict__ x, const gate_elem* __restrict__ g, elem* __restrict__ y, int width, int span) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  const gate_elem* gates = g + (size_t)blockIdx.x * (width / span);
  float v[VX_VEC], open[VX_VEC];
  load(v, x + (size_t)blockIdx.x * width + i);
  if (span == 1) {
    load(open, gates + i);
  } else {
    float shared = to_float(gates[i / span]);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) open[j] = shared;
  }
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) v[j] *= activated(open[j]);
  store(y + (size_t)blockIdx.x * width + i, v);
}
VX_EXPORT(gate)
