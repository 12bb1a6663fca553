// mask_logits: copies logits, -inf where a row's mask forbids the id. NaN and +inf stay, because
//              they refuse the row whatever its mask says.
// edit_logits: adds the sparse edits of each row, then applies its penalties, in place; each step
//              of arithmetic is rounded as vllmx_core.reference.sampler does it.
// Rows with a target are scored, not sampled: nothing is edited.
//
// Layout: logits (L, V) of f32; masks (N, words) with bit (id & 31) of word id >> 5 set = allowed;
//         mask_index (L), -1: everything is allowed; edits and counts in sparse groups, entries
//         start[row] .. start[row + 1], ids unique in a row. pending (L): the token that row feeds,
//         tokens[logit_rows[row]], counts as generated though the host has not seen it.
// Grid:   mask_logits (L, chunks), edit_logits (L); 256 threads.
// Floor:  bytes: mask_logits reads and writes every logit once; edit_logits touches its entries.
#include "sample_rows.h"
#include "vx.h"

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
mask_logits(const float* __restrict__ logits, const int* __restrict__ mask_index,
            const u32* __restrict__ masks, const int* __restrict__ target, float* __restrict__ out,
            int vocab, int words) {
  int row = blockIdx.x, first = blockIdx.y * CHUNK, last = min(first + CHUNK, vocab);
  int index = mask_index && target[row] < 0 ? mask_index[row] : -1;
  const u32* mask = index < 0 ? nullptr : masks + (size_t)index * words;
  for (int id = first + threadIdx.x; id < last; id += CHUNK_THREADS) {
    float logit = logits[(size_t)row * vocab + id];
    bool refuses = !(logit < VX_INFINITY);
    if (mask && !refuses && !(mask[id >> 5] >> (id & 31) & 1)) logit = -VX_INFINITY;
    out[(size_t)row * vocab + id] = logit;
  }
}
VX_EXPORT(mask_logits)

VX_DEV float penalised(float logit, int count, float repetition, float frequency, float presence) {
  logit = logit > 0.f ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
  logit = __fsub_rn(logit, __fmul_rn(frequency, (float)count));
  return __fsub_rn(logit, __fmul_rn(presence, count > 0 ? 1.f : 0.f));
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
edit_logits(float* logits, const int* __restrict__ edit_start, const int* __restrict__ edit_ids,
            const float* __restrict__ edit_values, const int* __restrict__ count_start,
            const int* __restrict__ count_ids, const int* __restrict__ counts,
            const u8* __restrict__ pending, const int* __restrict__ tokens,
            const int* __restrict__ logit_rows, const float* __restrict__ repetition,
            const float* __restrict__ frequency, const float* __restrict__ presence,
            const int* __restrict__ target, int vocab) {
  __shared__ int pending_is_listed;
  int row = blockIdx.x;
  if (target[row] >= 0) return;
  float* line = logits + (size_t)row * vocab;
  if (edit_start)
    for (int i = edit_start[row] + threadIdx.x; i < edit_start[row + 1]; i += CHUNK_THREADS)
      line[edit_ids[i]] = __fadd_rn(line[edit_ids[i]], edit_values[i]);
  if (!count_start) return;
  if (threadIdx.x == 0) pending_is_listed = 0;
  __syncthreads();  // an id may be edited by one thread and counted by another
  int fed = pending[row] ? tokens[logit_rows[row]] : -1;
  for (int i = count_start[row] + threadIdx.x; i < count_start[row + 1]; i += CHUNK_THREADS) {
    int id = count_ids[i], count = counts[i] + (id == fed);
    if (id == fed) pending_is_listed = 1;
    line[id] = penalised(line[id], count, repetition[row], frequency[row], presence[row]);
  }
  __syncthreads();
  if (threadIdx.x == 0 && fed >= 0 && !pending_is_listed)
    line[fed] = penalised(line[fed], 1, repetition[row], frequency[row], presence[row]);
}
VX_EXPORT(edit_logits)
