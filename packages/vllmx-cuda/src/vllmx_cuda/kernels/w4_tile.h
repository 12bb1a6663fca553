// A tile of codes that lie in shared memory as bytes -> the order of w4_codes.h.
#pragma once
#include "w4_codes.h"

// u32 from a row of codes, each a byte, to the next: an odd number keeps rows in banks of their own
#define CODE_PITCH (TILE_COLS / 4 + 1)
#define CODES_WORDS (TILE_ROWS * CODE_PITCH)

// Nibbles of four columns of rows g and g + 8; of 6 bits the low ones
VX_DEV u32 low_bits(u32 top, u32 bottom) {
  if (VX_BITS == 6) top &= 0x0f0f0f0fu, bottom &= 0x0f0f0f0fu;
  return __byte_perm(top | bottom << 4, 0, 0x3120);  // pair and odd change places
}
// The high two of 6 bits of four columns: pair at bit 4, odd at bit 16
VX_DEV u32 high_bits(u32 codes) {
  u32 even = codes >> 4 & 0x00030003u, odd = codes >> 12 & 0x00030003u;
  return ((even | even >> 12) & 0x33) | ((odd | odd >> 12) & 0x33) << 16;
}

// By a whole warp, of which a lane writes its 16 bytes at once. codes: CODES_WORDS, of this warp alone.
VX_DEV void store_tile(u8* tile, const u32* codes, int lane) {
  const u32 *top = codes + lane / 4 * CODE_PITCH, *bottom = top + 8 * CODE_PITCH;
  u32 words[2][4], high[2] = {0, 0};
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int s = 0; s < 2; s++) {
      int at = half * 8 + (VX_BITS == 6 ? 4 * s + lane % 4 : 2 * (lane % 4) + s);
      u32 t = top[at], b = bottom[at];
      if (VX_BITS == 8) {
        words[half][2 * s] = __byte_perm(t, b, 0x5410);
        words[half][2 * s + 1] = __byte_perm(t, b, 0x7632);
      } else {
        words[0][2 * half + s] = low_bits(t, b);
      }
      if (VX_BITS == 6) high[half] |= (high_bits(t) | high_bits(b) << 2) << 8 * s;
    }
  }
  uint4* out = reinterpret_cast<uint4*>(tile) + lane;
  out[0] = make_uint4(words[0][0], words[0][1], words[0][2], words[0][3]);
  if (VX_BITS == 8) out[32] = make_uint4(words[1][0], words[1][1], words[1][2], words[1][3]);
  if (VX_BITS == 6)
    reinterpret_cast<uint2*>(tile + HIGH_AT)[lane] = make_uint2(high[0], high[1]);
}
