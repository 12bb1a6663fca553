// Blocks of GGUF files as they lie in the file, cut into runs of 32 values that one thread unpacks:
// value[i] = scale[i / 16] * code[i] - low[i / 16]. VX_BLOCK is ggml's number of the type.
#pragma once
#include "vx.h"

#define VX_Q4_0 2
#define VX_Q4_1 3
#define VX_Q5_0 6
#define VX_Q5_1 7
#define VX_Q8_0 8
#define VX_Q2_K 10
#define VX_Q3_K 11
#define VX_Q4_K 12
#define VX_Q5_K 13
#define VX_Q6_K 14
#define VX_IQ4_NL 20
#define VX_IQ4_XS 23
#define VX_MXFP4 39
#ifndef VX_BLOCK
#define VX_BLOCK VX_Q8_0
#endif

// RUNS_A_BLOCK, BLOCK_BYTES; HALVES: each 16 values have their scale; HAS_LOW: not all lows are 0
#if VX_BLOCK == VX_Q4_0
#define BLOCK_BYTES 18
#define HAS_LOW 1
#elif VX_BLOCK == VX_Q4_1
#define BLOCK_BYTES 20
#define HAS_LOW 1
#elif VX_BLOCK == VX_Q5_0
#define BLOCK_BYTES 22
#define HAS_LOW 1
#elif VX_BLOCK == VX_Q5_1
#define BLOCK_BYTES 24
#define HAS_LOW 1
#elif VX_BLOCK == VX_Q8_0
#define BLOCK_BYTES 34
#elif VX_BLOCK == VX_Q2_K
#define RUNS_A_BLOCK 8
#define BLOCK_BYTES 84
#define HALVES 1
#define HAS_LOW 1
#elif VX_BLOCK == VX_Q3_K
#define RUNS_A_BLOCK 8
#define BLOCK_BYTES 110
#define HALVES 1
#elif VX_BLOCK == VX_Q4_K
#define RUNS_A_BLOCK 8
#define BLOCK_BYTES 144
#define HAS_LOW 1
#elif VX_BLOCK == VX_Q5_K
#define RUNS_A_BLOCK 8
#define BLOCK_BYTES 176
#define HAS_LOW 1
#elif VX_BLOCK == VX_Q6_K
#define RUNS_A_BLOCK 8
#define BLOCK_BYTES 210
#define HALVES 1
#elif VX_BLOCK == VX_IQ4_NL
#define BLOCK_BYTES 18
#elif VX_BLOCK == VX_IQ4_XS
#define RUNS_A_BLOCK 8
#define BLOCK_BYTES 136
#elif VX_BLOCK == VX_MXFP4
#define BLOCK_BYTES 17
#endif
#ifndef RUNS_A_BLOCK
#define RUNS_A_BLOCK 1
#endif
#ifndef HALVES
#define HALVES 0
#endif
#ifndef HAS_LOW
#define HAS_LOW 0
#endif
#define RUN 32

// Codes as signed bytes, four to a word, in the order of the values
struct Run {
  int codes[RUN / 4];
  float scale[2], low[2];
};

VX_DEV void set_scale(Run& run, float scale, float low) {
  run.scale[0] = run.scale[1] = scale, run.low[0] = run.low[1] = low;
}
VX_DEV float half_at(const u8* p) { return __half2float(*reinterpret_cast<const f16*>(p)); }
// Blocks of most types are aligned to two bytes only, those of MXFP4 to one.
VX_DEV u32 word_at(const u8* p) {
  if (BLOCK_BYTES % 4 == 0) return *reinterpret_cast<const u32*>(p);
  if (BLOCK_BYTES % 2) return p[0] | p[1] << 8 | p[2] << 16 | (u32)p[3] << 24;
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
  set_scale(run, half_at(block) * scale, half_at(block + 2) * low);
}

// Minus `less` (127 at most) in each byte: a flipped top bit keeps bytes from borrowing.
VX_DEV u32 minus(u32 codes, u32 less) { return ((codes | 0x80808080u) - less) ^ 0x80808080u; }

// Bytes of a table of 16 by the four nibbles of 16 bits
VX_DEV u32 look_up(const u32 (&table)[4], u32 nibbles) {
  u32 low = __byte_perm(table[0], table[1], nibbles & 0x7777);
  u32 high = __byte_perm(table[2], table[3], nibbles & 0x7777);
  return __byte_perm(low, high, 0x3210 | (nibbles & 0x8888) >> 1);
}
// As unpack_nibbles, each nibble an index
VX_DEV void unpack_indices(Run& run, const u8* nibbles, const u32 (&table)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 word = word_at(nibbles + 4 * i);
    u32 first = look_up(table, word & 0xffff), second = look_up(table, word >> 16);
    run.codes[i] = (int)__byte_perm(first, second, 0x6420);
    run.codes[i + 4] = (int)__byte_perm(first, second, 0x7531);
  }
}
#define IQ4_LEVELS {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}
#define E2M1_DOUBLED {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}

VX_DEV void unpack_run(Run& run, const u8* block, int r) {
#if VX_BLOCK == VX_Q8_0
  set_scale(run, half_at(block), 0.f);
#pragma unroll
  for (int i = 0; i < 8; i++) run.codes[i] = (int)word_at(block + 2 + 4 * i);
#elif VX_BLOCK == VX_Q4_0
  set_scale(run, half_at(block), 8.f * half_at(block));
  unpack_nibbles(run, block + 2, 0);
#elif VX_BLOCK == VX_Q4_1
  set_scale(run, half_at(block), -half_at(block + 2));
  unpack_nibbles(run, block + 4, 0);
#elif VX_BLOCK == VX_Q5_0
  set_scale(run, half_at(block), 16.f * half_at(block));
  unpack_nibbles(run, block + 6, word_at(block + 2));
#elif VX_BLOCK == VX_Q5_1
  set_scale(run, half_at(block), -half_at(block + 2));
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
  run.scale[0] = d * scales[2 * r], run.scale[1] = d * scales[2 * r + 1];
  run.low[0] = run.low[1] = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 code = word_at(low + 4 * i) >> (r % 4 / 2 * 4) & 0x0f0f0f0fu;
    code |= (word_at(high + 4 * i) >> (r % 4 * 2) & 0x03030303u) << 4;
    run.codes[i] = (int)minus(code, 0x20202020u);
  }
#elif VX_BLOCK == VX_Q2_K
  float d = half_at(block + 80), d_low = half_at(block + 82);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int packed = block[2 * r + h];
    run.scale[h] = d * (packed & 15), run.low[h] = d_low * (packed >> 4);
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    run.codes[i] = (int)(word_at(block + 16 + r / 4 * 32 + 4 * i) >> (r % 4 * 2) & 0x03030303u);
#elif VX_BLOCK == VX_Q3_K
  float d = half_at(block + 108);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int group = 2 * r + h;  // of 16; its scale is a nibble of 8 bytes and a pair of bits of 4
    int scale = block[96 + group % 8] >> (group / 8 * 4) & 15;
    scale |= (block[104 + group % 4] >> (group / 4 * 2) & 3) << 4;
    run.scale[h] = d * (scale - 32), run.low[h] = 0.f;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 code = word_at(block + 32 + r / 4 * 32 + 4 * i) >> (r % 4 * 2) & 0x03030303u;
    code |= (word_at(block + 4 * i) >> r & 0x01010101u) << 2;
    run.codes[i] = (int)minus(code, 0x04040404u);
  }
#elif VX_BLOCK == VX_IQ4_NL
  const u32 levels[4] = IQ4_LEVELS;
  set_scale(run, half_at(block), 0.f);
  unpack_indices(run, block + 2, levels);
#elif VX_BLOCK == VX_IQ4_XS
  const u32 levels[4] = IQ4_LEVELS;
  int scale = (block[4 + r / 2] >> (r % 2 * 4) & 15) | (block[2 + r / 4] >> (r % 4 * 2) & 3) << 4;
  set_scale(run, half_at(block) * (scale - 32), 0.f);
  unpack_indices(run, block + 8 + 16 * r, levels);
#elif VX_BLOCK == VX_MXFP4
  const u32 doubled[4] = E2M1_DOUBLED;
  int exponent = block[0];  // of twice the scale; below 2 its half is subnormal
  set_scale(run, __int_as_float(exponent < 2 ? 0x200000 << exponent : (exponent - 1) << 23), 0.f);
  unpack_indices(run, block + 1, doubled);
#endif
}

// Where run i of a row begins: its block and the run within it
VX_DEV void unpack(Run& run, const u8* row, int i) {
  unpack_run(run, row + (size_t)(i / RUNS_A_BLOCK) * BLOCK_BYTES, i % RUNS_A_BLOCK);
}
