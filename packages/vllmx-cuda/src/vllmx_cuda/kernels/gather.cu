// gather_rows:    y[i] = table[ids[i]]: embedding, and the rows that want logits.
// gather_columns: y[i][j] = x[i][columns[j]], 0 where that is negative: activations in the order of a weight's columns, of
//                 which some may only fill up a group.
// spread:         y[i][id] = x[i][sources[id]], -inf where that is negative: logits of a reduced vocabulary in the places of the
//                 whole one.
// resize:         runs of `size` features behind the first `kept` cut to `resized` features, or filled up with zeros.
// begin_step:     tokens that the host could not know yet, -(i + 1) for row i of the step before,
//                 become what that row sampled, 0 where it was refused; and the entries of the
//                 block table that changed since the step before are put in place.
//
// Layout: table (rows, width), x (N, pitch), y (N, width) of elem; VX_VEC divides resize's sizes; ids (N); columns (width); spread's x (N, reduced), y and
//         sources (width) of f32, which holds all ids exactly; patches (M, 2): index into the block
//         table, -1 where unused, no index twice, and the entry.
// Grid:   gather_rows and resize (N, ceil(width / (256 * VX_VEC))), gather_columns and spread with VX_VEC 1, begin_step (ceil(max(N, M) / 256)); 256
//         threads.
// Floor:  bytes: the gathered rows once in, once out.
#include "vx.h"

extern "C" __global__ void __launch_bounds__(256)
gather_rows(const int* __restrict__ ids, const elem* __restrict__ table, elem* __restrict__ y,
            int width) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  const elem* row = table + (size_t)ids[blockIdx.x] * width;
  store_pack(y + (size_t)blockIdx.x * width + i, load_pack<elem, VX_VEC>(row + i));
}
VX_EXPORT(gather_rows)

extern "C" __global__ void __launch_bounds__(256)
gather_columns(const elem* __restrict__ x, const int* __restrict__ columns, elem* __restrict__ y,
               int width, int pitch) {
  int i = blockIdx.y * 256 + threadIdx.x;
  if (i >= width) return;
  int column = columns[i];
  elem value = column < 0 ? from_float<elem>(0.f) : x[(size_t)blockIdx.x * pitch + column];
  y[(size_t)blockIdx.x * width + i] = value;
}
VX_EXPORT(gather_columns)

extern "C" __global__ void __launch_bounds__(256)
spread(const float* __restrict__ x, const float* __restrict__ sources, float* __restrict__ y, int width, int reduced) {
  int i = blockIdx.y * 256 + threadIdx.x;
  if (i >= width) return;
  float source = sources[i];
  y[(size_t)blockIdx.x * width + i] = source < 0.f ? -VX_INFINITY : x[(size_t)blockIdx.x * reduced + (int)source];
}
VX_EXPORT(spread)

extern "C" __global__ void __launch_bounds__(256)
resize(const elem* __restrict__ x, elem* __restrict__ y, int width, int pitch, int kept, int size, int resized) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  int run = max(i - kept, 0) / resized, at = i - kept - run * resized;  // below 0 where features stay
  float v[VX_VEC] = {};
  if (at < size) load(v, x + (size_t)blockIdx.x * pitch + kept + run * size + at);
  store(y + (size_t)blockIdx.x * width + i, v);
}
VX_EXPORT(resize)

extern "C" __global__ void __launch_bounds__(256)
begin_step(int* tokens, const int* __restrict__ sampled, int* __restrict__ block_table,
           const int* __restrict__ patches, int count, int num_patches) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i < count && tokens[i] < 0) tokens[i] = max(sampled[-tokens[i] - 1], 0);
  if (i < num_patches && patches[2 * i] >= 0) block_table[patches[2 * i]] = patches[2 * i + 1];
}
VX_EXPORT(begin_step)
