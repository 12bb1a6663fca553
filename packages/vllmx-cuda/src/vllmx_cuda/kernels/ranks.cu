// own_ids:      ids of the whole vocabulary become rows of this rank's table, 0 where it has none.
// keep_own:     the rows of y whose ids this rank's table does not have become zeros.
// join_columns: what one rank has of each row goes beside what others have.
// add_held:     rows that all ranks sent are added, of each row those of ranks that have one of its experts.
//
// Layout: ids, rows (N); y (N, width) of elem; of join_columns part (N, width) and y (N, pitch), from the rank's
//         first column on; of add_held parts (ranks, N, width) and ids (N, chosen) of experts.
// Grid:   own_ids (ceil(N / 256)), the others (N, ceil(width / (256 * VX_VEC))); 256 threads.
// Floor:  bytes: join_columns reads and writes each part once; keep_own writes the zeros alone; add_held reads
//         the parts that count and writes their sum.
#include "vx.h"

VX_DEV bool has(int id, int first, int total) { return id >= first && id < first + total; }

extern "C" __global__ void __launch_bounds__(256)
own_ids(const int* __restrict__ ids, int* __restrict__ rows, u64 count, int first, int total) {
  u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
  if (i < count) rows[i] = has(ids[i], first, total) ? ids[i] - first : 0;
}
VX_EXPORT(own_ids)

extern "C" __global__ void __launch_bounds__(256)
keep_own(const int* __restrict__ ids, elem* __restrict__ y, int width, int first, int total) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width || has(ids[blockIdx.x], first, total)) return;
  float zeros[VX_VEC] = {};
  store(y + (size_t)blockIdx.x * width + i, zeros);
}
VX_EXPORT(keep_own)

extern "C" __global__ void __launch_bounds__(256)
join_columns(const elem* __restrict__ part, elem* __restrict__ y, int width, int pitch) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  store_pack(y + (size_t)blockIdx.x * pitch + i, load_pack<elem, VX_VEC>(part + (size_t)blockIdx.x * width + i));
}
VX_EXPORT(join_columns)

// Experts are shared out evenly: rank r of n has those from r * experts / n on
VX_DEV int owner(int id, int experts, int ranks) { return ((id + 1) * ranks - 1) / experts; }

extern "C" __global__ void __launch_bounds__(256)
add_held(const elem* __restrict__ parts, const int* __restrict__ ids, elem* __restrict__ y, int width, int chosen,
         int experts, int ranks) {
  int i = (blockIdx.y * 256 + threadIdx.x) * VX_VEC;
  if (i >= width) return;
  const int* of_row = ids + (size_t)blockIdx.x * chosen;
  u64 held = 0;
  for (int j = 0; j < chosen; j++) held |= 1ull << owner(of_row[j], experts, ranks);
  float sum[VX_VEC] = {};
  for (int rank = 0; rank < ranks; rank++) {
    if (!(held >> rank & 1)) continue;
    float v[VX_VEC];
    load(v, parts + ((size_t)rank * gridDim.x + blockIdx.x) * width + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) sum[j] += v[j];
  }
  store(y + (size_t)blockIdx.x * width + i, sum);
}
VX_EXPORT(add_held)
