// What models that see images have beside others, row by row.
//
// turn:    the rotation of each token, where each frequency is turned by one of several positions: row t of y has in
//          column j the cosine, and in column half + j the sine, of frequency j at the token's position on axis j.
// patches: y = x, normalised pixels in f32, as elem.
// mix:     y[t] = the sum of weights[t][j] * table[rows[t][j]] over j: interpolated positions of patches.
// keep:    store[to[i]] = x[i], in f32, where to[i] is not negative.
// place:   y[t] = x[t]; where rows[t] names a row of the store, that one instead, or their sum.
//
// Layout: rope (positions, 2 * half) and y of turn (T, 2 * half) of f32, cosines, then sines; positions (T, lines); axes0 to axes3: two
//         bits for each frequency, 32 in a word. table (rows, width), x and y of elem; rows, weights (T, taps);
//         to (L, for taps T, -1: none), rows (T, -1: none); store (features, width) of f32.
// Grid:   turn (ceil(T * half / 256)), patches (ceil(count / (256 * VX_VEC))), the others (rows, ceil(width / (256 * VX_VEC))); 256
//         threads, VX_VEC neighbours each (turn: one).
// Floor:  bytes: what is read once in, once out.
#include "vx.h"

extern "C" __global__ void __launch_bounds__(256)
turn(const float* __restrict__ rope, const int* __restrict__ positions, float* __restrict__ y, int count, int half,
     int lines, u64 axes0, u64 axes1, u64 axes2, u64 axes3) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  int token = i / half, j = i % half;
  u64 word = j < 32 ? axes0 : j < 64 ? axes1 : j < 96 ? axes2 : axes3;
  int axis = (int)(word >> j % 32 * 2) & 3;
  const float* row = rope + (size_t)positions[token * lines + axis] * 2 * half;
  float* to = y + (size_t)token * 2 * half;
  to[j] = row[j], to[half + j] = row[half + j];
}
VX_EXPORT(turn)

extern "C" __global__ void __launch_bounds__(256)
patches(const float* __restrict__ x, elem* __restrict__ y, u64 count) {
  u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * VX_VEC;
  if (i >= count) return;
  float v[VX_VEC];
  load(v, x + i);
  store(y + i, v);
}
VX_EXPORT(patches)

extern "C" __global__ void __launch_bounds__(256)
mix(const elem* __restrict__ table, const int* __restrict__ rows, const float* __restrict__ weights,
    elem* __restrict__ y, int width, int taps) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC, first = blockIdx.x * taps;
  if (i >= width) return;
  float sum[VX_VEC] = {};
#pragma unroll 4
  for (int tap = first; tap < first + taps; tap++) {
    float v[VX_VEC], weight = weights[tap];
    load(v, table + (size_t)rows[tap] * width + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) sum[j] += weight * v[j];
  }
  store(y + (size_t)blockIdx.x * width + i, sum);
}
VX_EXPORT(mix)

extern "C" __global__ void __launch_bounds__(256)
keep(const elem* __restrict__ x, const int* __restrict__ to, float* __restrict__ kept, int width) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width || to[blockIdx.x] < 0) return;
  float v[VX_VEC];
  load(v, x + (size_t)blockIdx.x * width + i);
  store(kept + (size_t)to[blockIdx.x] * width + i, v);
}
VX_EXPORT(keep)

extern "C" __global__ void __launch_bounds__(256)
place(const elem* __restrict__ x, const int* __restrict__ rows, const float* __restrict__ kept, elem* __restrict__ y,
      int width, int adds) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC, row = rows[blockIdx.x];
  if (i >= width) return;
  float v[VX_VEC];
  if (row < 0 || adds) load(v, x + (size_t)blockIdx.x * width + i);
  if (row >= 0) {
    float feature[VX_VEC];
    load(feature, kept + (size_t)row * width + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) v[j] = adds ? v[j] + feature[j] : feature[j];
  }
  store(y + (size_t)blockIdx.x * width + i, v);
}
VX_EXPORT(place)
