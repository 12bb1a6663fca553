// What stands around the products with experts (experts_mma, experts_gemv): slots in the order of their experts before
// them, the sum of a token's slots after them. Slots, positions and tiles: expert_tiles.h.
#include "expert_tiles.h"
#include "vx.h"

#define THREADS 1024

// Sum of all values of threads before this one; `total` is that of all. at: THREADS words of shared memory.
VX_DEV int before(int own, int* at, int* total) {
  int i = threadIdx.x, value = own;
  __syncthreads();  // an earlier use may still be read
  at[i] = own;
  __syncthreads();
  for (int step = 1; step < THREADS; step *= 2) {
    int other = i >= step ? at[i - step] : 0;
    __syncthreads();
    at[i] = value += other;
    __syncthreads();
  }
  *total = at[THREADS - 1];
  return value - own;
}

// experts_order: which position each slot has, and the tiles of at most `width` positions.
//
// Layout: ids (S) of i32, the expert of each slot, of which those here are `from` to `from` + X - 1, X at most 1024;
//         order (S): the slot of each position; place (S): the position of each slot, -1 where its expert is not here;
//         tiles (N, 3), N at least min(S, X + S / width).
// Grid:   1 block, a thread an expert. Which of an expert's slots comes first depends on the order of atomics; no
//         product's bits depend on that.
// Floor:  the latency of two passes over the ids.
extern "C" __global__ void __launch_bounds__(THREADS)
experts_order(const int* __restrict__ ids, int* __restrict__ order, int* __restrict__ place, int* __restrict__ tiles,
              int slots, int num_tiles, int width, int from, int experts) {
  __shared__ int counts[THREADS], scan[THREADS];
  int expert = threadIdx.x, total;
  counts[expert] = 0;
  __syncthreads();
  for (int s = threadIdx.x; s < slots; s += THREADS) {
    unsigned own = ids[s] - from;
    if (own < (unsigned)experts) atomicAdd(&counts[own], 1);
  }
  __syncthreads();
  int count = counts[expert], first = before(count, scan, &total);
  int own_tiles = (count + width - 1) / width, tile = before(own_tiles, scan, &total);
  for (int i = 0; i < own_tiles; i++) {
    int* at = tiles + 3 * (size_t)(tile + i);
    at[0] = expert;
    at[1] = first + i * width;
    at[2] = min(width, count - i * width);
  }
  for (int i = total + threadIdx.x; i < num_tiles; i += THREADS) tiles[3 * (size_t)i + 2] = 0;
  counts[expert] = first;
  __syncthreads();
  for (int s = threadIdx.x; s < slots; s += THREADS) {
    unsigned own = ids[s] - from;
    place[s] = -1;
    if (own >= (unsigned)experts) continue;
    int position = atomicAdd(&counts[own], 1);
    order[position] = s;
    place[s] = position;
  }
}
VX_EXPORT(experts_order)

// experts_sum: y[t] = the sum of weights[t, j] * out[place[t * k + j]] in the order of j, slots without a place left out.
//
// Layout: out (S, E) of f32, rows by position; place (S) of i32; weights (T, k) of f32; y (T, E) of elem.
// Grid:   (T, ceil(E / (256 * VX_VEC))), 256 threads, VX_VEC neighbours each.
// Floor:  bytes of out, read once.
extern "C" __global__ void __launch_bounds__(256)
experts_sum(const float* __restrict__ out, const int* __restrict__ place, const float* __restrict__ weights,
            elem* __restrict__ y, int width, int chosen) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  size_t slot = (size_t)blockIdx.x * chosen;
  float sum[VX_VEC] = {}, v[VX_VEC];
  for (int j = 0; j < chosen; j++) {
    int position = place[slot + j];
    if (position < 0) continue;
    load(v, out + (size_t)position * width + i);
    float weight = weights[slot + j];
#pragma unroll
    for (int e = 0; e < VX_VEC; e++) sum[e] += weight * v[e];
  }
  store(y + (size_t)blockIdx.x * width + i, sum);
}
VX_EXPORT(experts_sum)

// clamped_swiglu: g * sigmoid(alpha * g) * (u + 1) with g at most `limit` and u between -limit and limit.
//
// Layout: gate_up (S, 2F), y (S, F) of elem.
// Grid:   (S, ceil(F / (256 * VX_VEC))), 256 threads, VX_VEC neighbours each.
// Floor:  bytes: the input read once, the output written once.
extern "C" __global__ void __launch_bounds__(256)
clamped_swiglu(const elem* __restrict__ gate_up, elem* __restrict__ y, int width, float alpha, float limit) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  const elem* row = gate_up + (size_t)blockIdx.x * 2 * width;
  float g[VX_VEC], u[VX_VEC];
  load(g, row + i);
  load(u, row + width + i);
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) {
    // A comparison keeps NaN, which fminf and fmaxf would turn into the limit
    float gate = g[j] > limit ? limit : g[j];
    float up = u[j] > limit ? limit : u[j] < -limit ? -limit : u[j];
    g[j] = gate / (1.f + expf(-alpha * gate)) * (up + 1.f);
  }
  store(y + (size_t)blockIdx.x * width + i, g);
}
VX_EXPORT(clamped_swiglu)
