// The inner loops of `linear`: one tile part of 16 * NR output rows times MB tokens. Those of weights that
// are not quantised are in micro_dense.h.
//
// Weights come 16 rows interleaved, so that a lane is an output row and a token's activation is
// broadcast. A `unit` is the step along K: one k for f32 and f16, a pair of k for bf16. Every
// (row, token) is one accumulator that walks K from front to back, whatever NR and MB are: this, and
// nothing else, makes a row's bits independent of the batch around it.
#pragma once
#include "block_kinds.h"
#if defined(__AVX512VNNI__)
#include "micro_pairs.h"
#endif

namespace vx {
namespace VX_ISA {

// Blocks of 16 rows and tokens that one call keeps in registers.
#if VX_NATIVE_BYTES == 64
enum { MICRO_BLOCKS = 2, MICRO_TOKENS = 12 };  // 24 accumulators + 2 weights + 1 broadcast of 32
#elif VX_NATIVE_BYTES == 32
enum { MICRO_BLOCKS = 1, MICRO_TOKENS = 6 };   // 12 + 2 + 1 of 16
#elif defined(__aarch64__)
enum { MICRO_BLOCKS = 1, MICRO_TOKENS = 6 };   // 24 + 4 + 1 of 32
#else
enum { MICRO_BLOCKS = 1, MICRO_TOKENS = 2 };   // 8 + 4 + 1 of 16
#endif

// w: blocks, block_bytes apart. panel: [units][MB] activations. c: [MB][32] receives the sums.
// next: the blocks that are used after these, to be fetched into the cache meanwhile; null: all are there.
typedef void (*Micro)(const uint8_t*, size_t, int32_t, const uint8_t*, float*, const uint8_t*);

// The micro kernel for a number of tokens from 1 to MOST.
template <class Kind, int MOST, int MB = 1>
VX_INLINE Micro micro_for(int tokens) {
  if constexpr (MB < MOST) {
    if (tokens > MB) return micro_for<Kind, MOST, MB + 1>(tokens);
  }
#if defined(__AVX512VNNI__)
  if constexpr (ONE_SUM<Kind>) return micro_pairs<Kind, MB>;
#endif
  return micro_blocks<Kind, MICRO_BLOCKS, MB>;
}

}  // namespace VX_ISA
}  // namespace vx
