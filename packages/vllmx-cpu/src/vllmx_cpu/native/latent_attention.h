// Arguments of `latent_attention`, and where its workspace has what.
//
// A page holds one row of C + Dr numbers for each of its P positions, bf16, f16 or f32, one after the
// other. All heads read the same rows: a head's query is multiplied with its matrix of k_b first, and
// what it finds among the latents with its matrix of v_b.
#pragma once
#include "attention.h"
#include "ops.h"

struct VxLatentAttention {
  VxWeight k_b, v_b;     // of head 0, (C, Dn) and (Dv, C); those of the others lie behind
  const float* q;        // (T, H * (Dn + Dr))
  const float* latent;   // (T, C + Dr)
  float* out;            // (T, H * Dv)
  const float* rope;     // (positions, Dr) cos | sin
  const float* norm;     // (C)
  void* pages;           // (blocks, P, C + Dr)
  void* panels;          // room for the packed activations of either product, 64-byte aligned
  void* workspace;       // LatentRoom, 64-byte aligned
  size_t workspace_bytes;
  int32_t num_heads, rank, nope_size, rotary_dim, value_size;  // H, C, Dn, Dr, Dv
  int32_t interleaved;
  int32_t block_size;    // P
  int32_t kv_dtype;      // VxDType of the pages
  int32_t group;         // which of the step's block tables lists them
  float scale, norm_eps;
  const int32_t* picked; // (T, num_picked) positions that a token attends to, then -1; or null: all
  int32_t num_picked;
};

namespace vx {

// What follows each other in the workspace. A step of many tokens goes through in parts.
struct LatentRoom {
  enum { TOKENS = 64, HEADS = 1024 };  // of a part; at most
  size_t heads;   // (H, tokens, Dn) before k_b, (H, tokens, Dv) behind v_b
  size_t found;   // (H, tokens, C) queries among latents, then what they found
  size_t picked;  // (tokens, num_picked) slots
  size_t states;  // of cut units: vx_attention_workspace_bytes

  LatentRoom(int64_t num_heads, int64_t rank, int64_t nope_size, int64_t value_size, int64_t num_picked) {
    heads = 0;
    found = heads + rounded(num_heads * TOKENS * (nope_size > value_size ? nope_size : value_size) * 4);
    picked = found + rounded(num_heads * TOKENS * rank * 4);
    states = picked + rounded(TOKENS * num_picked * 4);
  }
  static size_t rounded(int64_t bytes) { return ((size_t)bytes + 63) / 64 * 64; }
};

}  // namespace vx
