// What the attention kernels share. Scores are in units of log2, so that a weight is one exp2.
#pragma once
#include "vx.h"

#define LOG2E 1.4426950408889634f
#define NOTHING -1e30f  // a maximum over no score: finite, so that differences stay numbers

VX_DEV float to_log2(float score, float softcap) {
  return (softcap > 0.f ? softcap * tanhf(score / softcap) : score) * LOG2E;
}

// The first position that a token sees, below 0: all. A `window` below 0 is a chunk of so many
// positions, which begins at a multiple of them.
VX_DEV int first_seen(int position, int window) {
  if (window < 0) return position - position % -window;
  return window > 0 ? position - window + 1 : 0;
}

// The weight of a head's sink joins the sum; returns what to multiply the accumulated values by.
VX_DEV float normaliser(const float* sinks, int head, float top, float sum) {
  if (!sinks) return sum > 0.f ? 1.f / sum : 0.f;
  float sink = sinks[head] * LOG2E, greatest = fmaxf(top, sink);
  float factor = exp2f(top - greatest);
  return factor / (sum * factor + exp2f(sink - greatest));
}
