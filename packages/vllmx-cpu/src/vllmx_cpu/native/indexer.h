// Arguments of `indexer`.
//
// A page holds one key of D numbers for each of its P positions, bf16, f16 or f32, one after the other, as a
// page of latents does.
#pragma once
#include "attention.h"
#include "ops.h"

struct VxIndexer {
  const float* q;         // (T, H * D)
  const float* key;       // (T, D)
  const float* weights;   // (T, H)
  int32_t* out;           // (T, K) positions, then -1
  const float* rope;      // (positions, Dr) cos | sin
  void* pages;            // (blocks, P, D)
  void* workspace;        // (IndexerRoom::TOKENS, stride) float
  int32_t num_heads, head_size, rotary_dim;  // H, D, Dr
  int32_t picked;         // K
  int32_t interleaved;
  int32_t block_size;     // P
  int32_t kv_dtype;       // VxDType of the pages
  int32_t group;          // which of the step's block tables lists them
  int32_t stride;         // scores of a token: the longest context, in whole chunks of 64
  int32_t ratio;          // above 1: pages hold keys of entries of so many tokens, P of them; `key` is null
};

namespace vx {

// A step of many tokens goes through in parts of `TOKENS`; `BYTES` of queries are a unit's at most, unless
// one token has more.
struct IndexerRoom {
  enum { TOKENS = 64, BYTES = 1 << 19 };
};

}  // namespace vx
