// Thresholds from a histogram of tempered logits: which bins can hold them, then the exact value.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>

#include "sampler_scan.h"

namespace vx {
namespace VX_ISA {

// The bin that holds the k-th greatest of what was counted, and its rank (1 ...) within that bin.
// Nothing is cut (first > last) when there are no more than k.
struct RankedBin {
  SamplerDecision bins;
  int rank;
};

inline RankedBin find_rank(const uint32_t* histogram, int k) {
  int64_t total = 0, before = 0;
  for (int bin = 0; bin < kBins; ++bin) total += histogram[bin];
  if (total <= k) return {{-kInfinity, 1, 0}, 0};
  int bin = 0;
  while (before + histogram[bin] < k) before += histogram[bin++];
  return {{-kInfinity, bin, bin}, (int)(k - before)};
}

// The rank-th greatest of `values`, which are reordered.
inline float select_rank(float* values, int count, int rank) {
  std::nth_element(values, values + rank - 1, values + count, std::greater<float>());
  return values[rank - 1];
}

// After top_k has cut at `value` inside `bin`: the histogram of what is left.
inline void trim_histogram(uint32_t* histogram, int bin, const float* values, int count, float value) {
  histogram[bin] = (uint32_t)std::count_if(values, values + count, [=](float v) { return v >= value; });
  for (int later = bin + 1; later < kBins; ++later) histogram[later] = 0;
}

// The bins between which the mass, added up from the top, certainly reaches `target`: a bin's ids
// weigh no less than its lower edge says and no more than its upper one.
inline SamplerDecision find_mass(const uint32_t* histogram, float scale, double target) {
  double most = 0, least = 0;
  SamplerDecision found = {-kInfinity, kBins, kBins - 1};
  for (int bin = 0; bin < kBins; ++bin) {
    if (histogram[bin] == 0) continue;
    double upper = bin == 0 ? 0.0 : (bin - 0.501) / scale, lower = (bin + 0.501) / scale;
    most += histogram[bin] * std::exp(-upper);
    if (bin < kBins - 1) least += histogram[bin] * std::exp(-lower);
    if (found.first == kBins && most * (1 + 1e-4) >= target) found.first = bin;
    found.last = bin;
    if (least * (1 - 1e-4) >= target) break;
  }
  return found;
}

// Sum of exp(x).
inline double sum_exp(const float* x, int count) {
  F32x16 sum = zero();
  for (int i = 0; i < count; i += 16) sum = sum + mass_of(load_logits(x, i, count), -kInfinity);
  return (double)reduce_add(sum);
}

// The greatest value such that all values from it up, and the mass above them, weigh `target`; the
// least one when they never do. Reorders the values: halves them by size until a few are left to sort.
inline float select_mass(float* values, int count, double mass, double target) {
  int first = 0, last = count;
  while (last - first > 64) {
    int middle = first + (last - first) / 2;
    std::nth_element(values + first, values + middle, values + last, std::greater<float>());
    double upper = sum_exp(values + first, middle - first);
    if (mass + upper >= target) {
      last = middle;
    } else {
      mass += upper;
      first = middle;
    }
  }
  std::sort(values + first, values + last, std::greater<float>());
  for (int i = first; i < last; ++i) {
    mass += std::exp((double)values[i]);
    if (mass >= target) return values[i];
  }
  return values[last - 1];
}

}  // namespace VX_ISA
}  // namespace vx
