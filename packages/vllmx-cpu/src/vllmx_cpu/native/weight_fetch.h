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
    fetch_codes<3>(w, block_bytes, u + NEAR, units, next);
    fetch_codes<2>(w, block_bytes, u + FAR, units, next);
    // A tail lies far from its codes, and is small: one block ahead.
    const uint8_t* tail = next + (size_t)units * CODES + (size_t)u * TAIL;
#pragma GCC unroll 2
    for (int b = 0; b < BLOCKS; ++b)
      for (int i = 0; i < TAIL; i += 64) __builtin_prefetch(tail + b * block_bytes + i, 0, 2);
  }

 private:
  template <int LOCALITY>
  VX_INLINE void fetch_codes(const uint8_t* w, size_t block_bytes, int32_t u, int32_t units, const uint8_t* next) {
    const uint8_t* codes = (u < units ? w : next) + (size_t)(u < units ? u : u - units) * CODES;
#pragma GCC unroll 2
    for (int b = 0; b < BLOCKS; ++b)
#pragma GCC unroll 8
      for (int i = 0; i < CODES; i += 64) __builtin_prefetch(codes + b * block_bytes + i, 0, LOCALITY);
  }
};

// Units of UNIT_BYTES, which are so many lines that asking for all of them at once would hold up what uses a
// unit: one of PARTS is asked for each time that the object is called. Once, into the second-level cache:
// the nearer request as well cost a Zen 4 a tenth of its rate with one token, and 4 or 8 KiB ahead were
// slower than this. An object, as GCC takes a lambda that only asks for memory for one without effect and
// drops its calls.
template <int UNIT_BYTES, int PARTS>
class BesideUnit {
 public:
  // Beside unit u of the block at w, which is followed by `next`; null: nothing is asked for.
  VX_INLINE BesideUnit of(const uint8_t* w, size_t block_bytes, int32_t u, const uint8_t* next) {
    const size_t at = (size_t)u * UNIT_BYTES + AHEAD;
    return {!next ? nullptr : at < block_bytes ? w + at : next + (at - block_bytes)};
  }
  inline __attribute__((always_inline)) void operator()(int part) const {
    if (!unit_) return;
#pragma GCC unroll 8
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(unit_ + part * BYTES + i, 0, 2);
  }

 private:
  enum { AHEAD = 6656, BYTES = (UNIT_BYTES / 64 + PARTS - 1) / PARTS * 64 };  // the last part may reach beyond
  BesideUnit(const uint8_t* unit) : unit_(unit) {}
  const uint8_t* unit_;
};

}  // namespace VX_ISA
}  // namespace vx
