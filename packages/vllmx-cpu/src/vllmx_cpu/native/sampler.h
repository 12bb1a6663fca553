// The sampler op: vllmx_core.plan.SamplingRows over (L, V) logits; the same definition in numpy is
// vllmx_core.reference.sampler, choice by choice.
//
// Rows are independent. With at least half as many rows as threads, each row is one thread's; else all
// threads work on one row after the other, a slice of the vocabulary each. Every sum runs over fixed
// slices and is put together in order, so neither the threads nor the other rows change a result.
//
// A sampled row takes: one pass for the maximum; where top_k or top_p are on, one for the mass and a
// histogram of the tempered logits, from which the few bins that hold the threshold are known, and a
// pass that collects those bins; one pass that draws, noise being computed only where an id can still
// win. Passes after the first skip whole vectors that cannot matter. The vocabulary is never sorted.
#pragma once
#include "vx.h"

#define VX_MAX_LOGPROBS 64  // greatest max_logprobs

// Pointers are those of SamplingRows, in its order; a null group (edits, counts, masks) is off.
struct VxSampler {
  const float* logits;               // (L, V), left as they are
  int32_t vocab_size;
  int32_t max_logprobs;              // -1 = no logprobs; 0 ... VX_MAX_LOGPROBS
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* repetition_penalty;
  const float* frequency_penalty;
  const float* presence_penalty;
  const uint64_t* seed;
  const int32_t* position;
  const int32_t* target;
  const int32_t* num_logprobs;
  const int32_t* edit_start;         // (L + 1) or null
  const int32_t* edit_ids;
  const float* edit_values;
  const int32_t* count_start;        // (L + 1) or null
  const int32_t* count_ids;
  const int32_t* output_counts;
  const uint8_t* pending;            // (L)
  const int32_t* mask_index;         // (L) or null
  const uint32_t* masks;             // (N, ceil(V / 32))
  const int32_t* group_from;         // (L) or null
  int32_t* ids;                      // out (L)
  float* chosen;                     // out, as LogprobRows; (L)
  int32_t* rank;                     // (L)
  int32_t* top_ids;                  // (L, max_logprobs)
  float* top;                        // (L, max_logprobs)
  const int32_t* whole_index;        // (L) row of `whole`, -1 = none; or null
  float* whole;                      // (A, V) logits of the rows that want them all
  void* workspace;                   // shared by the team, 64-byte aligned, free between ops
};

extern "C" {
// Bytes of VxSampler::workspace for a team of nth threads.
VX_EXPORT size_t vx_sampler_workspace_bytes(int32_t vocab_size, int32_t nth);
}

namespace vx {
namespace VX_ISA {
// args: VxSampler. Rows are step->L; the token that row i feeds is step->tokens[step->logit_rows[i]].
void sample(const void* args, const VxStep* step, VxCtx* ctx);
}  // namespace VX_ISA
}  // namespace vx
