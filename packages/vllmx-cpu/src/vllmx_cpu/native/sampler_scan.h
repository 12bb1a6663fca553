// Passes over one slice of a row's logits. A slice is kSlice consecutive ids (the last one of a row
// may be shorter); what a pass returns for it depends on nothing else.
#pragma once
#include "sampler_noise.h"
#include "sampler_space.h"

namespace vx {
namespace VX_ISA {

constexpr int kSlice = kSamplerSlice;
constexpr int kBins = kSamplerBins;
constexpr float kInfinity = __builtin_inff();

// Tempered logits x = (logit - greatest) / temperature, of which those below `cut` are out.
struct Tempering {
  float greatest, temperature, cut;

  VX_INLINE F32x16 apply(const Tempering& t, F32x16 logit) {
    return (logit - splat(t.greatest)) / splat(t.temperature);
  }
  // A logit below this has x below the bound: a cheap test, a little on the safe side.
  static float logit_bound(const Tempering& t, float x) {
    float wide = (x < 0 ? -x : x) * t.temperature, greatest = t.greatest < 0 ? -t.greatest : t.greatest;
    return t.greatest - wide - 1e-5f * (wide + greatest) - 1e-30f;
  }
};

// exp(x) where x is not below the cut, else 0.
VX_INLINE F32x16 mass_of(F32x16 x, float cut) {
  return select(x >= splat(cut), exp2_nonpositive(x * splat(kLog2e)), zero());
}

// Logits i ... i + 15 of n; -inf beyond the end.
VX_INLINE F32x16 load_logits(const float* logits, int i, int n) {
  if (i + 16 <= n) return load(logits + i);
  return select(first_lanes(n - i), load_n(logits + i, n - i), splat(-kInfinity));
}

VX_INLINE SamplerExtremes scan_extremes(const float* logits, int n) {
  F32x16 greatest[4], least[4];
  I32x16 broken[4];
  for (int j = 0; j < 4; ++j) {
    greatest[j] = splat(-kInfinity), least[j] = splat(kInfinity), broken[j] = splat_i32(0);
  }
  int i = 0;
  for (; i + 64 <= n; i += 64) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      F32x16 v = load(logits + i + 16 * j);
      greatest[j] = max(greatest[j], v);
      least[j] = min(least[j], v);
      broken[j] = broken[j] | (v != v);
    }
  }
  for (; i < n; i += 16) {
    F32x16 v = load_logits(logits, i, n);
    greatest[0] = max(greatest[0], v);
    least[0] = min(least[0], select(first_lanes(n - i < 16 ? n - i : 16), v, splat(kInfinity)));
    broken[0] = broken[0] | (v != v);
  }
  greatest[0] = max(max(greatest[0], greatest[1]), max(greatest[2], greatest[3]));
  least[0] = min(min(least[0], least[1]), min(least[2], least[3]));
  bool any_broken = any(broken[0] | broken[1] | broken[2] | broken[3]);
  return {reduce_max(greatest[0]), -reduce_max(-least[0]), any_broken};
}

// The first index whose logit equals `value`; n when there is none.
VX_INLINE int find_first(const float* logits, int n, float value) {
  for (int i = 0; i < n; i += 16) {
    if (!any(load_logits(logits, i, n) == splat(value))) continue;
    for (int j = i; j < n && j < i + 16; ++j)
      if (logits[j] == value) return j;
  }
  return n;
}

VX_INLINE int count_greater(const float* logits, int n, float value) {
  I32x16 count = splat_i32(0);
  for (int i = 0; i < n; i += 16) count = count - (load_logits(logits, i, n) > splat(value));
  int32_t lanes[16], total = 0;
  store_i32(lanes, count);
  for (int i = 0; i < 16; ++i) total += lanes[i];
  return total;
}

// Sum of exp(x) over what the cut leaves of the slice.
VX_INLINE double sum_mass(const float* logits, int n, const Tempering& t) {
  F32x16 logit_bound = splat(Tempering::logit_bound(t, t.cut));
  F32x16 sums[4] = {zero(), zero(), zero(), zero()};
  for (int i = 0; i < n; i += 64) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      if (i + 16 * j >= n) break;
      F32x16 v = load_logits(logits, i + 16 * j, n);
      if (!any(v >= logit_bound)) continue;
      sums[j] = sums[j] + mass_of(Tempering::apply(t, v), t.cut);
    }
  }
  return (double)reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// A tempered logit's bin: -x * scale, rounded; the last bin is open.
VX_INLINE I32x16 bins_of(F32x16 x, float scale) {
  return to_i32(min(-x * splat(scale), splat((float)(kBins - 1))));
}

// As sum_mass, and counts the ids by bin; those that are cut go to bin kBins.
VX_INLINE double sum_mass_and_count(const float* logits, int n, const Tempering& t, float scale,
                                    uint32_t* histogram) {
  F32x16 sums[4] = {zero(), zero(), zero(), zero()};
  for (int i = 0; i < n; i += 64) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      if (i + 16 * j >= n) break;
      F32x16 x = Tempering::apply(t, load_logits(logits, i + 16 * j, n));
      sums[j] = sums[j] + mass_of(x, t.cut);
      I32x16 kept = (x >= splat(t.cut)) & (x > splat(-kInfinity));
      alignas(64) int32_t bins[16];
      store_i32(bins, select(kept, bins_of(x, scale), splat_i32(kBins)));
      for (int lane = 0; lane < 16; ++lane) ++histogram[bins[lane]];
    }
  }
  return (double)reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Writes the tempered logits whose bin is first ... last (and that the cut leaves) to `out`, room for n
// of them, and returns how many; *mass_before: the mass of those in bins before `first`.
VX_INLINE int collect_bins(const float* logits, int n, const Tempering& t, float scale, int first, int last,
                           float* out, double* mass_before) {
  float lowest = -((float)last + 1.0f) / scale;
  F32x16 logit_bound = splat(last == kBins - 1 ? -kInfinity : Tempering::logit_bound(t, lowest));
  F32x16 sum = zero();
  int count = 0;
  for (int i = 0; i < n; i += 16) {
    F32x16 v = load_logits(logits, i, n);
    if (!any(v >= logit_bound)) continue;
    F32x16 x = Tempering::apply(t, v);
    I32x16 kept = (x >= splat(t.cut)) & (x > splat(-kInfinity)), bins = bins_of(x, scale);
    sum = sum + select(bins < splat_i32(first), mass_of(x, t.cut), zero());
    I32x16 inside = kept & (bins >= splat_i32(first)) & (bins <= splat_i32(last));
    if (!any(inside)) continue;
    alignas(64) float values[16];
    alignas(64) int32_t flags[16];
    store(values, x);
    store_i32(flags, inside);
    for (int lane = 0; lane < 16 && i + lane < n; ++lane) {
      if (flags[lane]) out[count++] = values[lane];
    }
  }
  *mass_before = (double)reduce_add(sum);
  return count;
}

// Keeps the `width` greatest logits in slot->listing, greatest first, of equals the lower id; called for
// ascending ids.
VX_INLINE void list_likeliest(const float* logits, int first, int n, int width, SamplerSlot* slot) {
  for (int i = 0; i < n; i += 16) {
    bool full = slot->listed == width;
    if (full && !any(load_logits(logits, i, n) > splat(slot->listing[width - 1].score))) continue;
    for (int k = i; k < n && k < i + 16; ++k) {
      int at = slot->listed;
      if (at == width && !(logits[k] > slot->listing[width - 1].score)) continue;
      if (at == width) --at;
      else ++slot->listed;
      for (; at > 0 && logits[k] > slot->listing[at - 1].score; --at) slot->listing[at] = slot->listing[at - 1];
      slot->listing[at] = {logits[k], first + k};
    }
  }
}

// dst = src where the mask's bit is set (everywhere without a mask), else -inf.
VX_INLINE void copy_masked(const float* src, int n, const uint32_t* mask, float* dst) {
  if (!mask) {
    __builtin_memcpy(dst, src, (size_t)n * sizeof(float));
    return;
  }
  alignas(64) uint32_t bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = 1u << i;
  U32x16 bit = load_u32(bits);
  for (int i = 0; i < n; i += 16) {
    U32x16 half = splat_u32((mask[i / 32] >> (i & 16)) & 0xffff);
    F32x16 v = select((half & bit) != splat_u32(0), load_logits(src, i, n), splat(-kInfinity));
    store_n(dst + i, v, n - i < 16 ? n - i : 16);
  }
}

// The id of greatest x + noise among first ... first + n - 1 that beats *winner (which keeps a tie).
// known_score: that of some id of the row, so that what cannot reach it is passed over.
VX_INLINE void draw_slice(const float* logits, int first, int n, const Tempering& t, uint64_t seed,
                          uint32_t position, float known_score, SamplerWinner* winner) {
  for (int i = 0; i < n; i += kNoiseBlock) {
    float goal = winner->score > known_score ? winner->score : known_score;
    float bound = goal - kGreatestNoise > t.cut ? goal - kGreatestNoise : t.cut;
    int length = n - i < kNoiseBlock ? n - i : kNoiseBlock;
    F32x16 v[4];
    for (int j = 0; j < 4; ++j) {
      v[j] = 16 * j < length ? load_logits(logits + i, 16 * j, length) : splat(-kInfinity);
    }
    F32x16 greatest = max(max(v[0], v[1]), max(v[2], v[3]));
    if (!any(greatest >= splat(Tempering::logit_bound(t, bound)))) continue;
    NoiseWords noise = noise_words(seed, position, (uint32_t)(first + i));
    float best_x = reduce_max(Tempering::apply(t, greatest));
    if (best_x + greatest_gumbel(noise) < goal) continue;
    alignas(64) float gumbel[kNoiseBlock], scores[kNoiseBlock];
    store_gumbel(noise, gumbel);
    for (int j = 0; j < 4; ++j) {
      F32x16 x = Tempering::apply(t, v[j]);
      store(scores + 16 * j, select(x >= splat(t.cut), x + load(gumbel + 16 * j), splat(-kInfinity)));
    }
    for (int k = 0; k < length; ++k)
      if (scores[k] > winner->score) *winner = {scores[k], first + i + k};
  }
}

}  // namespace VX_ISA
}  // namespace vx
