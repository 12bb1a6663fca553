// one_shot_sum:  y = the sum of what all ranks have, each of which reads the others' memory.
// one_shot_norm: the same; then residual += sum, y = rms_norm(residual), as add_rms_norm does.
//
// Layout: x, residual, y (rows, width) of elem, of which x and y may be one; weight (width) of f32. peers (ranks) has
//         the address of what each rank shares: u32 calls[blocks], how many calls of a block it has begun, which
//         nobody else reads; u32 arrived[RANKS][blocks], for how many of them each rank has put down its part; then,
//         at a multiple of 256 bytes, elem parts[2][blocks][slot], two in turn, in which a block has its slot in
//         every call. stop: a word of the host; not zero: nobody waits any more, and what was computed is worth
//         nothing.
// Grid:   (rows), at most `blocks`, and so few that all run at once: a block waits for that of the other ranks.
//         Whole warps share one row.
// Floor:  one trip over the links for the words and one for the parts. Parts are added in f32 in the order of the
//         ranks, so that all have the same bits.
#include "row_norm.h"

#define RANKS 8
#define LOOKS 1024

struct Peers {
  const u64* at;
  u32* stop;
  int blocks, slot, rank, ranks;
  u32 patience;
};

VX_DEV u32* calls(const Peers& p) { return (u32*)p.at[p.rank] + blockIdx.x; }
// Where `at` finds that `of` has arrived
VX_DEV u32* arrived(const Peers& p, int at, int of) {
  return (u32*)p.at[at] + (size_t)(1 + of) * p.blocks + blockIdx.x;
}
VX_DEV elem* part(const Peers& p, int of, u32 call) {
  u64 words = (u64)(1 + RANKS) * p.blocks * 4, parts = (words + 255) / 256 * 256;
  return (elem*)(p.at[of] + parts) + ((size_t)(call & 1) * p.blocks + blockIdx.x) * p.slot;
}

// False: they will not come. A rank that never does must not hang the device: whoever has looked so often ends the
// waits of all blocks.
VX_DEV bool comes(const u32* word, u32 call, u32* stop, u32 patience) {
  for (u32 looks = 1; (int)(vx_load_acquire(word) - call) < 0; looks++) {
    if (looks == patience) vx_store_release(stop, 1u);
    if (looks % LOOKS == 0 || looks == patience)
      if (vx_load_acquire(stop)) return false;
  }
  return true;
}

// Puts this rank's row down for the others. True when all have put down theirs, for `call`; false: nothing may be
// read. Who writes a slot again has seen all others arrive at the call between, which they do when they have read it.
// lost: one word of shared memory.
VX_DEV bool meet(const elem* row, int width, const Peers& p, u32* lost, u32& call) {
  call = *calls(p) + 1;
  if (threadIdx.x == 0) *lost = 0;
  elem* mine = part(p, p.rank, call);
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC)
    store_pack(mine + i, load_pack<elem, VX_VEC>(row + i));
  __syncthreads();  // all of the row lies there, and all know the call
  if (threadIdx.x < p.ranks) {
    vx_store_release(arrived(p, threadIdx.x, p.rank), call);
    if (!comes(arrived(p, p.rank, threadIdx.x), call, p.stop, p.patience)) atomicOr(lost, 1u);
  }
  if (threadIdx.x == 0) *calls(p) = call;
  __syncthreads();  // all others have arrived
  return *lost == 0;
}

VX_DEV void add_parts(float (&sum)[VX_VEC], const Peers& p, u32 call, int i) {
  Pack<elem, VX_VEC> parts[RANKS];
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++)  // all of them are under way at once
    if (rank < p.ranks) parts[rank] = load_pack<elem, VX_VEC>(part(p, rank, call) + i);
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) sum[j] = to_float(parts[0].at[j]);
#pragma unroll
  for (int rank = 1; rank < RANKS; rank++)
    if (rank < p.ranks)
#pragma unroll
      for (int j = 0; j < VX_VEC; j++) sum[j] += to_float(parts[rank].at[j]);
}

extern "C" __global__ void __launch_bounds__(512)
one_shot_sum(const elem* x, elem* y, const u64* __restrict__ peers, u32* stop, int width, int blocks, int slot,
             int rank, int ranks, u32 patience) {
  __shared__ u32 lost;
  Peers p = {peers, stop, blocks, slot, rank, ranks, patience};
  u32 call;
  if (!meet(x + (size_t)blockIdx.x * width, width, p, &lost, call)) return;
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float sum[VX_VEC];
    add_parts(sum, p, call, i);
    store(y + (size_t)blockIdx.x * width + i, sum);
  }
}
VX_EXPORT(one_shot_sum)

extern "C" __global__ void __launch_bounds__(512)
one_shot_norm(const elem* x, elem* residual, const float* __restrict__ weight, elem* y,
              const u64* __restrict__ peers, u32* stop, int width, float eps, int blocks, int slot, int rank,
              int ranks, u32 patience) {
  __shared__ u32 lost;
  __shared__ float shares[32];
  Peers p = {peers, stop, blocks, slot, rank, ranks, patience};
  u32 call;
  if (!meet(x + (size_t)blockIdx.x * width, width, p, &lost, call)) return;
  elem* total = residual + (size_t)blockIdx.x * width;
  float ss = 0.f;
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float sum[VX_VEC], before[VX_VEC];
    add_parts(sum, p, call, i);
    load(before, total + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) {
      sum[j] = to_float(from_float<elem>(sum[j] + before[j]));
      ss += sum[j] * sum[j];
    }
    store(total + i, sum);
  }
  // each thread reads back only what it wrote itself
  normalise(total, weight, y + (size_t)blockIdx.x * width, width, eps, ss, shares);
}
VX_EXPORT(one_shot_norm)
