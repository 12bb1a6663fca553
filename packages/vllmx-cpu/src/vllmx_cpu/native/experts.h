// Arguments of `experts`, and where its workspace has what.
#pragma once
#include "ops.h"

struct VxExperts {
  VxWeight gate_up, down;  // of expert 0; those of the others lie behind, biases and columns too
  const float* x;          // (T, E)
  const int32_t* ids;      // (T, k)
  const float* weights;    // (T, k)
  float* y;                // (T, E)
  void* panels;            // room for the packed activations of either product, 64-byte aligned
  void* workspace;         // ExpertsRoom, 64-byte aligned
  int32_t count, chosen;   // X, k
  int32_t first;           // number of the first of these experts: slots of others add nothing
  int32_t activation;      // VxActivation
  float clamp;             // of gate and up: gate * sigmoid(alpha * gate) * (up + 1); 0 = none
  float alpha;             // 0: act(gate) * up
};

namespace vx {

// What follows each other in the workspace of a step of T tokens. A slot is a token with one of its k experts;
// rows are the slots sorted by expert.
struct ExpertsRoom {
  size_t inner;    // (T * k, F) float32 between an expert's matrices
  size_t outputs;  // (T * k, E) float32 of each row
  size_t order;    // of each thread: (T * k) tokens of the rows, (T * k) rows of the slots, (X + 1), parts
  size_t order_bytes;

  ExpertsRoom(int64_t tokens, int64_t chosen, int64_t features, int64_t width, int64_t count) {
    const int64_t slots = tokens * chosen, parts = slots < count ? slots : count;
    inner = 0;
    outputs = rounded(slots * features * 4);
    order = outputs + rounded(slots * width * 4);
    order_bytes = rounded((2 * slots + count + 1) * 4) + rounded(parts * PART_BYTES);
  }
  size_t bytes(int32_t threads) const { return order + (size_t)threads * order_bytes; }
  enum { PART_BYTES = 32 };
  static size_t rounded(int64_t bytes) { return ((size_t)bytes + 63) / 64 * 64; }
};

}  // namespace vx
