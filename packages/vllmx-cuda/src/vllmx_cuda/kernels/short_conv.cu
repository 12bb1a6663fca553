// short_conv, short_conv_keep: each channel over its last few tokens, causal and depthwise.
//
// Layout: x, y (T, C) of elem; w (C, K), bias (C) of f32; a slot of states holds (K - 1, C) of f32, the oldest token
//         first, `slot_floats` behind the slot before. token_rows (T): the row of each token, -1: padding. The state is
//         read by the first launch alone and written by the second alone, so that blocks may come in any order.
// Grid:   (T, ceil(C / 256)), 256 threads, a channel each.
// Floor:  bytes: x once from memory and K - 1 times more from L2, y once.
#include "activation.h"
#include "vx.h"

// What channel c had at a token before the row's first one of this step: -1 is the newest.
VX_DEV float kept_tap(const float* states, long long slot_floats, int slot, int token, int c, int channels, int kernel) {
  if (slot < 0) return 0.f;
  return states[slot * slot_floats + (size_t)(token + kernel - 1) * channels + c];
}

extern "C" __global__ void __launch_bounds__(256)
short_conv(const elem* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
           const int* __restrict__ token_rows, const int* __restrict__ query_start,
           const int* __restrict__ state_from, const float* __restrict__ states, elem* __restrict__ y,
           int channels, int kernel, int activates, long long slot_floats) {
  int c = blockIdx.y * 256 + threadIdx.x, row = token_rows[blockIdx.x];
  if (c >= channels || row < 0) return;
  int token = blockIdx.x - query_start[row];
  float sum = bias ? bias[c] : 0.f;
  for (int tap = 0; tap < kernel; tap++) {
    int before = tap - kernel + 1;
    float v = token + before >= 0 ? to_float(x[(size_t)((int)blockIdx.x + before) * channels + c])
                                  : kept_tap(states, slot_floats, state_from[row], token + before, c, channels, kernel);
    sum += v * w[(size_t)c * kernel + tap];
  }
  y[(size_t)blockIdx.x * channels + c] = from_float<elem>(activates ? activated(sum) : sum);
}
VX_EXPORT(short_conv)

extern "C" __global__ void __launch_bounds__(256)
short_conv_keep(const elem* __restrict__ x, const int* __restrict__ token_rows, const int* __restrict__ query_start,
                const int* __restrict__ state_from, const int* __restrict__ state_to,
                const int* __restrict__ state_after, float* __restrict__ states, int channels, int kernel,
                long long slot_floats) {
  int c = blockIdx.y * 256 + threadIdx.x, row = token_rows[blockIdx.x];
  if (c >= channels || row < 0) return;
  int begin = query_start[row], count = blockIdx.x + 1 - begin;
  int target = begin + count == query_start[row + 1] ? state_to[row] : state_after[blockIdx.x];
  if (target < 0) return;
  // The oldest first: in place, a tap is read before it is written.
  for (int i = 0; i < kernel - 1; i++) {
    int token = count - (kernel - 1) + i;
    float v = token >= 0 ? to_float(x[(size_t)(begin + token) * channels + c])
                         : kept_tap(states, slot_floats, state_from[row], token, c, channels, kernel);
    states[target * slot_floats + (size_t)i * channels + c] = v;
  }
}
VX_EXPORT(short_conv_keep)
