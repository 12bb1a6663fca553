// Sixteen blocks of a quantised type at a time, one in each lane: what every type has in common.
//
// A `Tile` holds value i of all sixteen blocks in vector i. A type's encoder reads it, writes the
// blocks' bytes and leaves what they express in `Tile::found`.
#pragma once
#include "encode_search.h"

namespace vx {
namespace VX_ISA {
namespace encode {

enum { MOST_VALUES = 256 };

struct Tile {
  alignas(64) float values[MOST_VALUES * 16];
  alignas(64) float codes[MOST_VALUES * 16];  // as small whole numbers, counted from 0 where they are written
  alignas(64) float found[MOST_VALUES * 16];  // what the blocks express
};

// The blocks of the first `lanes` lanes, one behind the other.
struct Blocks {
  uint8_t* data;
  int stride, lanes;

  void words(int offset, U32x16 bits) const { put(offset, bits, 4); }
  void halves(int offset, U32x16 bits) const { put(offset, bits, 2); }

 private:
  inline __attribute__((always_inline)) void put(int offset, U32x16 bits, int bytes) const {
    uint32_t lane_bits[16];
    store_u32(lane_bits, bits);
    for (int lane = 0; lane < lanes; ++lane)
      __builtin_memcpy(data + lane * stride + offset, lane_bits + lane, (size_t)bytes);
  }
};

VX_INLINE U32x16 whole(F32x16 x) { return as_u32(to_i32(x)); }
// Four numbers of a byte each as a word, the first lowest.
VX_INLINE U32x16 word_of(const U32x16* bytes) {
  return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24;
}

// COUNT codes, `of(i)` of at most BITS bits, as planes of WIDTH bytes: plane p of a byte holds the code
// p * WIDTH further on.
template <int COUNT, int WIDTH, int BITS, class Codes>
VX_INLINE void put_planes(const Blocks& out, int offset, Codes of) {
  const int planes = 8 / BITS;
  for (int first = 0; first < COUNT; first += planes * WIDTH)
    for (int w = 0; w < WIDTH; w += 4, offset += 4) {
      U32x16 bytes[4];
      for (int b = 0; b < 4; ++b) {
        bytes[b] = of(first + w + b);
        for (int p = 1; p < planes; ++p)
          bytes[b] = bytes[b] | of(first + p * WIDTH + w + b) << (p * BITS);
      }
      out.words(offset, word_of(bytes));
    }
}

}  // namespace encode
}  // namespace VX_ISA
}  // namespace vx
