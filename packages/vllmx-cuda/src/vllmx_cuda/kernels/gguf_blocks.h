// Blocks of GGUF files as they lie in the file, cut into runs of 32 values that one thread unpacks:
// value[i] = scale[i / 16] * code[i] - low. VX_BLOCK is ggml's number of the type.
#pragma once
#include "vx.h"

#define VX_Q4_0 2
#define VX_Q4_1 3
#define VX_Q5_0 6
#define VX_Q5_1 7
#define VX_Q8_0 8
#define VX_Q4_K 12
#define VX_Q5_K 13
#define VX_Q6_K 14
#ifndef VX_BLOCK
#define VX_BLOCK VX_Q8_0
#endif

#define RUN 32
#define RUNS_A_BLOCK (VX_BLOCK >= VX_Q4_K ? 8 : 1)
#if VX_BLOCK == VX_Q4_0
#define BLOCK_BYTES 18
#elif VX_BLOCK == VX_Q4_1
#define BLOCK_BYTES 20
#elif VX_BLOCK == VX_Q5_0
#define BLOCK_BYTES 22
#elif VX_BLOCK == VX_Q5_1
#define BLOCK_BYTES 24
#elif VX_BLOCK == VX_Q8_0
#define BLOCK_BYTES 34
#elif VX_BLOCK == VX_Q4_K
#define BLOCK_BYTES 144
#elif VX_BLOCK == VX_Q5_K
#define BLOCK_BYTES 176
#elif VX_BLOCK == VX_Q6_K
#define BLOCK_BYTES 210
#endif

// Codes as signed bytes, four to a word, in the order of the values
struct Run {
  int codes[RUN / 4];
  float scale[2], low;
};

VX_DEV float half_at(const u8* p) { return __half2float(*reinterpret_cast<const f16*>(p)); }
// Blocks of most types are aligned to two bytes only.
VX_DEV u32 word_at(const u8* p) {
  if (BLOCK_BYTES % 4 == 0) return *reinterpret_cast<const u32*>(p);
  const u16* halves = reinterpret_cast<const u16*>(p);
  return halves[0] | (u32)halves[1] << 16;
}
// Bits 0-3 of `bits` become bit 4 of the four bytes of a word.
VX_DEV u32 fifth_bits(u32 bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) << 4; }

// Types of one run: nibbles of values i and i + 16 share a byte.
VX_DEV void unpack_nibbles(Run& run, const u8* nibbles, u32 fifth) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 word = word_at(nibbles + 4 * i);
    run.codes[i] = (int)((word & 0x0f0f0f0fu) | fifth_bits(fifth >> 4 * i));
    run.codes[i + 4] = (int)((word >> 4 & 0x0f0f0f0fu) | fifth_bits(fifth >> (4 * i + 16)));
  }
}

// 6-bit scale and minimum of run r out of the 12 bytes of Q4_K and Q5_K
VX_DEV void scale_and_low(Run& run, const u8* block, int r) {
  const u8* packed = block + 4;
  int scale, low;
  if (r < 4) {
    scale = packed[r] & 63, low = packed[r + 4] & 63;
  } else {
    scale = (packed[r + 4] & 15) | packed[r - 4] >> 6 << 4;
    low = packed[r + 4] >> 4 | packed[r] >> 6 << 4;
  }
  run.scale[0] = run.scale[1] = half_at(block) * scale, run.low = half_at(block + 2) * low;
}

VX_DEV void unpack_run(Run& run, const u8* block, int r) {
#if VX_BLOCK == VX_Q8_0
  run.scale[0] = run.scale[1] = half_at(block), run.low = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) run.codes[i] = (int)word_at(block + 2 + 4 * i);
#elif VX_BLOCK == VX_Q4_0
  run.scale[0] = run.scale[1] = half_at(block), run.low = 8.f * run.scale[0];
  unpack_nibbles(run, block + 2, 0);
#elif VX_BLOCK == VX_Q4_1
  run.scale[0] = run.scale[1] = half_at(block), run.low = -half_at(block + 2);
  unpack_nibbles(run, block + 4, 0);
#elif VX_BLOCK == VX_Q5_0
  run.scale[0] = run.scale[1] = half_at(block), run.low = 16.f * run.scale[0];
  unpack_nibbles(run, block + 6, word_at(block + 2));
#elif VX_BLOCK == VX_Q5_1
  run.scale[0] = run.scale[1] = half_at(block), run.low = -half_at(block + 2);
  unpack_nibbles(run, block + 8, word_at(block + 4));
#elif VX_BLOCK == VX_Q4_K || VX_BLOCK == VX_Q5_K
  scale_and_low(run, block, r);
  const u8* nibbles = block + (VX_BLOCK == VX_Q5_K ? 48 : 16) + r / 2 * 32;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 word = word_at(nibbles + 4 * i) >> (r % 2 * 4) & 0x0f0f0f0fu;
    if (VX_BLOCK == VX_Q5_K) word |= (word_at(block + 16 + 4 * i) >> r & 0x01010101u) << 4;
    run.codes[i] = (int)word;
  }
#elif VX_BLOCK == VX_Q6_K
  const u8 *low = block + r / 4 * 64 + r % 2 * 32, *high = block + 128 + r / 4 * 32;
  const i8* scales = reinterpret_cast<const i8*>(block + 192);
  float d = half_at(block + 208);
  run.scale[0] = d * scales[2 * r], run.scale[1] = d * scales[2 * r + 1], run.low = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 code = word_at(low + 4 * i) >> (r % 4 / 2 * 4) & 0x0f0f0f0fu;
    code |= (word_at(high + 4 * i) >> (r % 4 * 2) & 0x03030303u) << 4;
    // minus 32 in each byte: codes + 128 - 32 never borrow, flipping the top bit takes 128 off
    run.codes[i] = (int)(((code | 0x80808080u) - 0x20202020u) ^ 0x80808080u);
  }
#endif
}

// Where run i of a row begins: its block and the run within it
VX_DEV void unpack(Run& run, const u8* row, int i) {
  unpack_run(run, row + (size_t)(i / RUNS_A_BLOCK) * BLOCK_BYTES, i % RUNS_A_BLOCK);
}
