// Integers of 4 or 8 bits in 32-bit words, as GPTQ, AWQ and compressed-tensors store them -> codes and factors in the order
// of w4_codes.h, while weights are loaded.
//
// Layout: words, lowest bits first. VX_PACKED 0: (K / a word's, N), neighbours in K share a word; 1: (K, N / 8), eight rows
//         share one, the odd ones behind the even; 2: (N, K / a word's). pitch: words from one entry to the next.
//         scales of VX_SCALE; zeros: null, or with VX_ZERO 1 words of rows in the order of the codes', (what is stored + zero_add) modulo
//         2^bits, or with VX_ZERO_BYTES i8 + zero_add. Entry (row, group) is at the row's number (of words: that of
//         its word) * row_step + group * group_step.
//         columns (K): input feature of each column, null: in order. data: rows of tiles, codes and then records.
//         fault: one u32 that was 0; 0x10000 + (zero & 0xffff) of a zero beyond what products take, above that the bits of a scale that
//         is not finite.
// Grid:   (N / 16, ceil(K / 64 / 8)), 256 threads, a warp a tile: a lane brings 32 codes of one row to shared memory, and the
//         factors of the groups that begin there, and takes its fragments from there. N is a multiple of 16, K of 32.
// Floor:  the host's link, 25 to 60 GB/s. A lane loads a word once, but where eight rows share one or columns are not in order: there
//         one code at a time, from L1. Lanes have 16 rows of one column: of transposed words they read runs of 64 bytes, of VX_PACKED 1
//         8 bytes (and blocks beside each other the rest of the sector), of VX_PACKED 2 16 lines. The slowest, with columns out of
//         order, takes 512 bytes in 512 cycles of an SM: 220 GB/s on 132 SMs.
#include "w4_tile.h"

#ifndef VX_PACKED
#define VX_PACKED 0
#endif
#ifndef VX_ZERO_BYTES
#define VX_ZERO_BYTES 0
#endif
#define PER_WORD (32 / VX_BITS)
#define CODE_MASK ((1u << VX_BITS) - 1)
#define RUN 32
#define MOST_ZERO (VX_BITS == 4 ? 127 : 255)  // that products take away from a code exactly

// Where the integer of a row is in a word of rows
VX_DEV int place_of(int row) {
  int i = row % PER_WORD;
  return (VX_PACKED == 1 ? i / 2 + i % 2 * (PER_WORD / 2) : i) * VX_BITS;
}

VX_DEV u32 code_at(const u32* words, int row, int column, int pitch) {
  if (VX_PACKED == 1) return words[(size_t)column * pitch + row / PER_WORD] >> place_of(row) & CODE_MASK;
  int entry = column / PER_WORD;
  u32 word = VX_PACKED == 0 ? words[(size_t)entry * pitch + row] : words[(size_t)row * pitch + entry];
  return word >> column % PER_WORD * VX_BITS & CODE_MASK;
}

// Of four columns that follow each other, each a byte; neighbours of words are loaded at once.
VX_DEV u32 codes_at(const u32* words, const int* columns, int row, int first, int pitch) {
  u32 codes = 0;
  if (VX_PACKED != 1 && !columns) {
    int entry = first / PER_WORD;
    codes = VX_PACKED == 0 ? words[(size_t)entry * pitch + row] : words[(size_t)row * pitch + entry];
    if (VX_BITS == 8) return codes;
    codes = codes >> first % PER_WORD * VX_BITS & 0xffff;
    codes = (codes | codes << 8) & 0x00ff00ffu;
    return (codes | codes << 4) & 0x0f0f0f0fu;
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    codes |= code_at(words, row, columns ? columns[first + i] : first + i, pitch) << 8 * i;
  return codes;
}

VX_DEV int zero_of(const void* zeros, int row, int group, int row_step, int group_step, int add) {
  if (VX_ZERO_BYTES)
    return static_cast<const i8*>(zeros)[(size_t)row * row_step + (size_t)group * group_step] + add;
  size_t at = (size_t)(row / PER_WORD) * row_step + (size_t)group * group_step;
  return (int)(((static_cast<const u32*>(zeros)[at] >> place_of(row)) + add) & CODE_MASK);
}

extern "C" __global__ void __launch_bounds__(256)
w4_repack_words(const u32* __restrict__ words, const scale_type* __restrict__ scales,
                const void* __restrict__ zeros, const int* __restrict__ columns,
                u8* __restrict__ data, u32* fault, int k, int group_shift, int pitch,
                int scale_row_step, int scale_group_step, int zero_row_step, int zero_group_step,
                int zero_add) {
  __shared__ u32 shared[8][CODES_WORDS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (k + TILE_COLS - 1) / TILE_COLS;
  int tile = blockIdx.y * 8 + warp;
  if (tile >= tiles) return;
  data += blockIdx.x * row_bytes(tiles, ((k - 1) >> group_shift) + 1);
  int in_tile = lane % TILE_ROWS, row = blockIdx.x * TILE_ROWS + in_tile, half = lane / TILE_ROWS;
  int first = tile * TILE_COLS + half * RUN, group = first >> group_shift;
  u32* own = shared[warp] + in_tile * CODE_PITCH + half * (RUN / 4);
#pragma unroll
  for (int j = 0; j < RUN / 4; j++)
    own[j] = first < k ? codes_at(words, columns, row, first + 4 * j, pitch) : 0;
  if (first < k && group << group_shift == first) {
    u8* record = data + (size_t)tiles * TILE_BYTES + (size_t)group * RECORD_BYTES;
    scale_type scale = scales[(size_t)row * scale_row_step + (size_t)group * scale_group_step];
    reinterpret_cast<scale_type*>(record)[in_tile] = scale;
    float size = fabsf(to_float(scale));
    if (!(size < VX_INFINITY)) atomicMax(fault, (u32)__float_as_int(size));
    if (VX_ZERO == 1) {
      int zero = zero_of(zeros, row, group, zero_row_step, zero_group_step, zero_add);
      record[SCALES_BYTES + in_tile] = (u8)zero;
      if (zero < 0 || zero > MOST_ZERO) atomicMax(fault, 0x10000u | (u32)(zero & 0xffff));
    }
  }
  __syncwarp();
  store_tile(data + (size_t)tile * TILE_BYTES, shared[warp], lane);
}
VX_EXPORT(w4_repack_words)
