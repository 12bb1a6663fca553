// route: the k experts of each token and their weights.
//
// Layout: logits (T, X) of elem; bias, factor (X) of f32 or null; ids (T, k) of i32; weights (T, k) of f32.
//         The experts lie in `groups` equal groups, at most 32, of which the best `kept` take part.
// Grid:   (ceil(T / 4)), 128 threads: a warp a token, whose scores lie in shared memory (2 * X of f32).
// Order:  by falling score + bias, ties to the lower expert; sums in an order that depends on X and k alone. A score
//         that is no number makes all weights of its token NaN and its experts 0 to k - 1.
// Floor:  bytes of the logits; a choice takes X / 32 reads of shared memory and five exchanges.
#include "vx.h"

#ifndef VX_SCORE
#define VX_SCORE 0
#endif
#define WARPS 4
#define NONE (-VX_INFINITY)

struct Best {
  float value;
  int index;
};

// The greater of two, of equal ones the lower index
VX_DEV Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

VX_DEV Best warp_best(Best own) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) {
    Best other = {__shfl_xor_sync(VX_ALL, own.value, lanes), __shfl_xor_sync(VX_ALL, own.index, lanes)};
    own = better(own, other);
  }
  return own;
}

// Scores of all experts
VX_DEV void score_experts(float* scores, const elem* logits, int experts, int lane) {
#if VX_SCORE
  for (int i = lane; i < experts; i += 32) scores[i] = 1.f / (1.f + expf(-to_float(logits[i])));
#else
  float top = NONE, sum = 0.f;
  for (int i = lane; i < experts; i += 32) top = fmaxf(top, to_float(logits[i]));
  top = warp_max(top);
  for (int i = lane; i < experts; i += 32) sum += scores[i] = expf(to_float(logits[i]) - top);
  sum = warp_sum(sum);
  for (int i = lane; i < experts; i += 32) scores[i] /= sum;
#endif
}

// Takes experts of other groups than the best out of `choice`; lane g ranks group g
VX_DEV void keep_groups(float* choice, int experts, int groups, int kept, int best_two, int lane) {
  int size = experts / groups;
  float first = NONE, second = NONE;
  if (lane < groups) {
    for (int i = lane * size; i < (lane + 1) * size; i++) {
      second = fmaxf(second, fminf(first, choice[i]));
      first = fmaxf(first, choice[i]);
    }
  }
  float own = best_two ? first + second : first;
  int rank = 0;
  for (int g = 0; g < groups; g++) {
    float other = __shfl_sync(VX_ALL, own, g);
    rank += other > own || (other == own && g < lane);
  }
  u32 mask = __ballot_sync(VX_ALL, rank < kept);
  __syncwarp();  // all lanes have read their groups
  for (int i = lane; i < experts; i += 32)
    if (!(mask >> (i / size) & 1)) choice[i] = NONE;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
route(const elem* __restrict__ logits, const float* __restrict__ bias, const float* __restrict__ factor,
      int* __restrict__ ids, float* __restrict__ weights, int tokens, int experts, int chosen, int groups, int kept,
      int best_two, int renormalise, float eps, float scale) {
  VX_DYNAMIC_SHARED(memory);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x * WARPS + warp;
  if (token >= tokens) return;
  float* scores = reinterpret_cast<float*>(memory) + (size_t)warp * 2 * experts;
  float* choice = scores + experts;
  score_experts(scores, logits + (size_t)token * experts, experts, lane);
  bool numbers = true;
  for (int i = lane; i < experts; i += 32) {
    choice[i] = scores[i] + (bias ? bias[i] : 0.f);
    numbers = numbers && choice[i] == choice[i];
  }
  numbers = __all_sync(VX_ALL, numbers);
  __syncwarp();
  if (groups > 1) keep_groups(choice, experts, groups, kept, best_two, lane);
  __syncwarp();

  ids += (size_t)token * chosen;
  weights += (size_t)token * chosen;
  float sum = 0.f;
  for (int j = 0; j < chosen; j++) {
    Best best = {NONE, experts};
    for (int i = lane; i < experts; i += 32) best = better(best, Best{choice[i], i});
    best = warp_best(best);
    int id = numbers && best.index < experts ? best.index : j;
    sum += scores[id];
    __syncwarp();
    if (lane == 0) {
      ids[j] = id;
      choice[id] = NONE;
    }
    __syncwarp();
  }
  float norm = renormalise ? sum + eps : 1.f;
  __syncwarp();
  for (int j = lane; j < chosen; j += 32) {
    int id = ids[j];
    float w = scores[id] / norm * scale * (factor ? factor[id] : 1.f);
    weights[j] = numbers ? w : __int_as_float(0x7fc00000);
  }
}
VX_EXPORT(route)
