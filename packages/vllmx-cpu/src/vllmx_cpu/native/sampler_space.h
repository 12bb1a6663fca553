// The sampler's workspace: one slot a thread, and where everything lies in it.
//
// A row that one thread has alone lives in that thread's slot. When all threads share a row, what they
// publish to each other lies in slot 0, and each keeps its histogram and lists in its own slot.
#pragma once
#include "sampler.h"

namespace vx {

constexpr int kSamplerSlice = 4096;  // ids
constexpr int kSamplerBins = 2048;

struct SamplerWinner {
  float score;
  int32_t id;
};

// What one thread decides on and the others read after a barrier.
struct SamplerDecision {
  float cut;            // tempered logits below it are out
  int32_t first, last;  // bins to collect; first > last: none
};

struct SamplerExtremes {
  float greatest, least;
  int32_t broken;  // NaN seen
};

struct SamplerSlot {
  SamplerDecision decisions[4];
  SamplerWinner winner;
  int32_t greater;        // logits above the chosen one's
  int32_t listed, taken;  // entries of `listing`, and those that the result has
  SamplerWinner listing[VX_MAX_LOGPROBS];   // likeliest first: raw logit, id
  uint32_t histogram[kSamplerBins + 16];    // the last sixteen: for what is not counted
};

// Arrays with an entry per slice or id, after the slot's fixed part.
struct SamplerArrays {
  SamplerExtremes* extremes[2];  // of raw, of edited logits
  double* mass[3];
  int32_t* collected;            // how many of each slice
  float* edited;                 // (V) logits
  float* values;                 // (V) tempered logits that were collected, slice by slice
};

inline size_t sampler_slices(int32_t vocab_size) { return ((size_t)vocab_size + kSamplerSlice - 1) / kSamplerSlice; }

// Carves a slot at `base` (null to measure) and returns its bytes.
inline size_t carve_sampler_slot(uint8_t* base, int32_t vocab_size, SamplerSlot** slot, SamplerArrays* arrays) {
  size_t used = 0, slices = sampler_slices(vocab_size);
  auto take = [&](size_t bytes) {
    uint8_t* at = base + used;
    used += (bytes + 63) / 64 * 64;
    return at;
  };
  *slot = (SamplerSlot*)take(sizeof(SamplerSlot));
  for (auto& array : arrays->extremes) array = (SamplerExtremes*)take(slices * sizeof(SamplerExtremes));
  for (auto& array : arrays->mass) array = (double*)take(slices * sizeof(double));
  arrays->collected = (int32_t*)take(slices * sizeof(int32_t));
  arrays->edited = (float*)take(slices * kSamplerSlice * sizeof(float));
  arrays->values = (float*)take((slices * kSamplerSlice + 16) * sizeof(float));
  return used;
}

}  // namespace vx
