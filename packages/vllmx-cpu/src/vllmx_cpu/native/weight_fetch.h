// Weights on their way from memory while those before them are used.
//
// Each unit of columns is asked for twice: far ahead, into the second-level cache, which has room for many
// requests, and shortly before its use, from there into the first. Either alone leaves memory idle: one
// thread of Emerald Rapids takes Q8_0 times 8 tokens at 10.2 GB/s without requests, 13.8 with the near ones,
// 13.3 with the far ones and 14.9 with both, of 15.9 that reading alone reached in the same run.
#pragma once
#include "simd.h"

namespace vx {
namespace VX_ISA {

enum { FETCH_AHEAD = 2048 };  // bytes between a weight's only request and its use, where one is enough

// A block of a quantised Kind is the codes of all units, then what else they have, its tail.
template <class Kind, int BLOCKS>
struct WeightFetch {
  enum {
    CODES = Kind::CODE_BYTES, TAIL = Kind::UNIT_BYTES - Kind::CODE_BYTES,
    NEAR = CODES < 1024 ? 1024 / CODES : 1, FAR = CODES < 4096 ? 8192 / CODES : 2,  // units
  };

  // To call before unit u of the BLOCKS blocks at w is used; those at `next` are used after them.
  VX_INLINE void before_unit(const uint8_t* w, size_t block_bytes, int32_t u, int32_t units, const uint8_t* next) {
    beside_unit<1>(w, block_bytes, u, units, next, 0);
    // A tail lies far from its codes, and is small: one block ahead.
    const uint8_t* tail = next + (size_t)units * CODES + (size_t)u * TAIL;
#pragma GCC unroll 2
    for (int b = 0; b < BLOCKS; ++b)
      for (int i = 0; i < TAIL; i += 64) __builtin_prefetch(tail + b * block_bytes + i, 0, 2);
  }
  // One of PARTS, to call while unit u is used, where a unit is so many lines that asking for all of them at
  // once holds up what uses it.
  template <int PARTS>
  VX_INLINE void beside_unit(const uint8_t* w, size_t block_bytes, int32_t u, int32_t units, const uint8_t* next,
                             int part) {
    fetch_codes<3, PARTS>(w, block_bytes, u + NEAR, units, next, part);
    fetch_codes<2, PARTS>(w, block_bytes, u + FAR, units, next, part);
  }

 private:
  template <int LOCALITY, int PARTS>
  VX_INLINE void fetch_codes(const uint8_t* w, size_t block_bytes, int32_t u, int32_t units, const uint8_t* next,
                             int part) {
    constexpr int BYTES = (CODES / 64 + PARTS - 1) / PARTS * 64;  // the last part may reach into the next unit
    const uint8_t* codes = (u < units ? w : next) + (size_t)(u < units ? u : u - units) * CODES + part * BYTES;
#pragma GCC unroll 2
    for (int b = 0; b < BLOCKS; ++b)
#pragma GCC unroll 8
      for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(codes + b * block_bytes + i, 0, LOCALITY);
  }
};

}  // namespace VX_ISA
}  // namespace vx
