// The indexer of sparse attention: keys into pages, scores of all positions, and the best of them.
//
// index_store: rotates each token's key into its page, and the queries.
// index_score: the sum over heads of weight * relu(q . k), for `count` tokens from `first` on.
// index_pick:  the K best positions of each of these tokens, ascending, then -1; ties go to the earlier one. A token
//              that sees at most K positions picks them all, and has no scores.
//
// Layout: q, queries (T, H, D), key (T, D), head_weights (T, H) and pages (blocks, P, D) of elem; rope (positions, Dr:
//         cos, then sin), scores (count, stride) of f32; picked (T, K) of i32; items, first_item, block_table: as in
//         paged_decode.cu, which name the row of a token.
// Grid:   store: (T, 1 + H), 128 threads, the first block of a token for its key. score: (count, ceil(stride / 256)),
//         128 threads: a lane has one of 32 positions, a warp every fourth head. pick: (count), 256 threads.
// Floor:  score: bytes of the keys once a token, H * D multiply-adds a position. pick: five reads of the scores.
#include "vx.h"

#define SPAN 256
#define CHUNK 32
#define WARPS 4
#define BINS 2048
#define PICKERS 256

// x (D): the first `rotary` values turned, the others as they are
VX_DEV void turn(elem* out, const elem* in, const float* table, int size, int rotary, int interleaved) {
  int half = rotary / 2;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    int first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
    float a = to_float(in[first]), b = to_float(in[second]), cosine = table[i], sine = table[half + i];
    out[first] = from_float<elem>(a * cosine - b * sine);
    out[second] = from_float<elem>(b * cosine + a * sine);
  }
  for (int i = rotary + threadIdx.x; i < size; i += blockDim.x) out[i] = in[i];
}

extern "C" __global__ void __launch_bounds__(128)
index_store(const elem* __restrict__ q, const elem* __restrict__ key, const int* __restrict__ positions,
            const int* __restrict__ slots, const float* __restrict__ rope, elem* __restrict__ queries,
            elem* __restrict__ pages, int heads, int size, int rotary, int interleaved) {
  int token = blockIdx.x, head = blockIdx.y - 1, slot = slots[token];
  const float* table = rope + (size_t)positions[token] * rotary;
  if (slot < 0) return;
  if (head < 0) return turn(pages + (size_t)slot * size, key + (size_t)token * size, table, size, rotary, interleaved);
  size_t at = ((size_t)token * heads + head) * size;
  turn(queries + at, q + at, table, size, rotary, interleaved);
}
VX_EXPORT(index_store)

extern "C" __global__ void __launch_bounds__(WARPS * 32)
index_score(const elem* __restrict__ queries, const elem* __restrict__ head_weights, const elem* __restrict__ pages,
            const int* __restrict__ positions, const int* __restrict__ items, const int* __restrict__ first_item,
            const int* __restrict__ block_table, float* __restrict__ scores, int first, int heads, int size, int picked,
            int stride, int table_stride, int page_shift) {
  VX_DYNAMIC_SHARED(memory);
  __shared__ float parts[WARPS][CHUNK];
  int token = first + blockIdx.x, begin = blockIdx.y * SPAN;
  if (first_item[token] == first_item[token + 1]) return;
  int seen = positions[token] + 1, end = min(begin + SPAN, seen);
  if (seen <= picked || begin >= end) return;
  const int* table = block_table + (size_t)items[4 * first_item[token] + 1] * table_stride;
  float* query = reinterpret_cast<float*>(memory);  // (H, D)
  float* keys = query + heads * size;               // (CHUNK, D + 1)
  for (int i = threadIdx.x; i < heads * size; i += WARPS * 32)
    query[i] = to_float(queries[(size_t)token * heads * size + i]);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int base = begin; base < end; base += CHUNK) {
    for (int i = threadIdx.x; i < CHUNK * size; i += WARPS * 32) {
      int position = base + i / size;
      float value = 0.f;
      if (position < end) {
        size_t slot = ((size_t)table[position >> page_shift] << page_shift) + (position & ((1 << page_shift) - 1));
        value = to_float(pages[slot * size + i % size]);
      }
      keys[i / size * (size + 1) + i % size] = value;
    }
    __syncthreads();
    float sum = 0.f;
    for (int head = warp; head < heads; head += WARPS) {
      float dot = 0.f;
      for (int i = 0; i < size; i++) dot += query[head * size + i] * keys[lane * (size + 1) + i];
      sum += to_float(head_weights[(size_t)token * heads + head]) * (dot < 0.f ? 0.f : dot);
    }
    parts[warp][lane] = sum;
    __syncthreads();  // the keys are read, too
    if (warp == 0 && base + lane < end) {
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) total += parts[i][lane];
      scores[(size_t)blockIdx.x * stride + base + lane] = total;
    }
  }
}
VX_EXPORT(index_score)

// The bits of a score as a number that grows with it; -0 is 0, what is no number is the lowest
VX_DEV u32 in_order(float x) {
  if (x != x) return 0;
  u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// How many threads before this one have `flag`; adds the flags of all to *total
VX_DEV int count_before(int flag, int* total, int* warps) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 mask = __ballot_sync(VX_ALL, flag);
  if (lane == 0) warps[warp] = __popc(mask);
  __syncthreads();
  int before = __popc(mask & ((1u << lane) - 1));
  for (int i = 0; i < PICKERS / 32; i++) {
    if (i < warp) before += warps[i];
    *total += warps[i];
  }
  __syncthreads();  // counts are written again
  return before;
}

extern "C" __global__ void __launch_bounds__(PICKERS)
index_pick(const float* __restrict__ scores, const int* __restrict__ positions, const int* __restrict__ first_item,
           int* __restrict__ picked, int first, int count, int stride) {
  __shared__ int bins[BINS], warps[PICKERS / 32], digit, rest;
  int token = first + blockIdx.x;
  if (first_item[token] == first_item[token + 1]) return;
  int seen = positions[token] + 1;
  int* out = picked + (size_t)token * count;
  if (seen <= count) {
    for (int i = threadIdx.x; i < count; i += PICKERS) out[i] = i < seen ? i : -1;
    return;
  }
  const float* own = scores + (size_t)blockIdx.x * stride;
  u32 threshold = 0, decided = 0;  // leading bits of the last one that is picked, and which are known
  int left = count;                // of those that begin with `threshold`, so many are picked
  for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
    u32 mask = shift == 0 ? 1023 : 2047;
    for (int i = threadIdx.x; i < BINS; i += PICKERS) bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < seen; i += PICKERS) {
      u32 bits = in_order(own[i]);
      if ((bits & decided) == threshold) atomicAdd(&bins[bits >> shift & mask], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int at = mask, more = left;
      while (bins[at] < more) more -= bins[at--];
      digit = at, rest = more;
    }
    __syncthreads();
    threshold |= (u32)digit << shift, decided |= mask << shift, left = rest;
  }
  int equal = 0, found = 0;
  for (int base = 0; base < seen; base += PICKERS) {
    int i = base + threadIdx.x;
    u32 bits = i < seen ? in_order(own[i]) : 0;
    int tied = i < seen && bits == threshold, earlier = equal;
    earlier += count_before(tied, &equal, warps);
    int taken = i < seen && (bits > threshold || (tied && earlier < left));
    int place = found;
    place += count_before(taken, &found, warps);
    if (taken) out[place] = i;
  }
}
VX_EXPORT(index_pick)
