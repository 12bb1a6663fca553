// head_norm: query, key and value heads normed where they lie, side by side in one row.
//
// Layout: qkv, out (T, (H + 2K) * D) of elem; q_norm (H * D), k_norm (K * D) of f32, null: those heads stay as they
//         are. A run is what one norm covers: a head, or with `across` all query heads, all key heads and each value
//         head. `layer`: queries and keys get a layer norm, else an RMS norm; `values`: value heads get an RMS norm
//         without a weight. VX_VEC divides D. Sums in f32, the variance from centred values.
// Grid:   (T, runs), whole warps.
// Floor:  bytes: qkv once from memory and up to twice more from L1, out once.
#include "vx.h"

struct Run {
  int first, width;
  const float* weight;
  bool is_value;
};

VX_DEV Run run_of(int run, const float* q_norm, const float* k_norm, int heads, int kv_heads, int size, int across) {
  if (across && run == 0) return {0, heads * size, q_norm, false};
  if (across && run == 1) return {heads * size, kv_heads * size, k_norm, false};
  int head = across ? run - 2 + heads + kv_heads : run, first = head * size;
  if (head < heads) return {first, size, q_norm ? q_norm + first : nullptr, false};
  if (head < heads + kv_heads) return {first, size, k_norm ? k_norm + first - heads * size : nullptr, false};
  return {first, size, nullptr, true};
}

extern "C" __global__ void __launch_bounds__(1024)
head_norm(const elem* __restrict__ qkv, const float* __restrict__ q_norm, const float* __restrict__ k_norm,
          elem* __restrict__ out, int heads, int kv_heads, int size, int across, int layer, int values, float eps) {
  __shared__ float part[32];
  Run run = run_of(blockIdx.y, q_norm, k_norm, heads, kv_heads, size, across);
  size_t at = (size_t)blockIdx.x * (heads + 2 * kv_heads) * size + run.first;
  const elem* row = qkv + at;
  bool centred = layer && run.weight, normed = run.weight || (run.is_value && values);
  float sum = 0.f, squares = 0.f, v[VX_VEC];
  for (int i = threadIdx.x * VX_VEC; centred && i < run.width; i += blockDim.x * VX_VEC) {
    load(v, row + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) sum += v[j];
  }
  float mean = centred ? block_sum(sum, part) / run.width : 0.f;
  for (int i = threadIdx.x * VX_VEC; normed && i < run.width; i += blockDim.x * VX_VEC) {
    load(v, row + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) squares += (v[j] - mean) * (v[j] - mean);
  }
  float scale = normed ? rsqrtf(block_sum(squares, part) / run.width + eps) : 1.f;
  for (int i = threadIdx.x * VX_VEC; i < run.width; i += blockDim.x * VX_VEC) {
    float w[VX_VEC];
    load(v, row + i);
    if (run.weight) load(w, run.weight + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) v[j] = (v[j] - mean) * scale * (run.weight ? w[j] : 1.f);
    store(out + at + i, v);
  }
}
VX_EXPORT(head_norm)
