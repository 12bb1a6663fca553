// How the sampler finds a threshold: by bins of counts or masses, whose sums do not depend on the order of
// atomics. A mass is an integer, exp(x) * 2^38, in three words that are added apart: nothing waits for a lock.
#pragma once
#include "sample_rows.h"
#include "vx.h"

#define BINS 2048
#define CANDIDATES 256  // of a chunk that are listed at most; vllmx_cuda.kernel_specs.sampling has the same
#define ROW_THREADS 512
#define MINUS_INFINITY_SIZE 0x7f800000u
#define PIECES 3
#define PIECE_BITS 13  // so that fewer than 2^19 ids do not overflow a word

struct Mass {
  u32 piece[PIECES];
};
// No greater than 0x1p38, in pieces from low to high
VX_DEV Mass mass_of(float x) {
  float left = expf(x) * 0x1p12f;
  u32 high = (u32)left;
  left = (left - high) * 0x1p13f;
  u32 middle = (u32)left;
  return {{(u32)((left - middle) * 0x1p13f + 0.5f), middle, high}};
}
VX_DEV u64 joined(u32 low, u32 middle, u32 high) {
  return low + ((u64)middle << PIECE_BITS) + ((u64)high << 2 * PIECE_BITS);
}

// x is 0 at most, so the bits of its magnitude order it: the smaller, the likelier.
VX_DEV u32 size_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }
// By value, because logits crowd into few exponents.
VX_DEV u32 first_bin_of(u32 size) { return (u32)fminf(__uint_as_float(size) * 64.f, BINS - 1.f); }

// Floats as words in the same order
VX_DEV u32 order_of(float v) {
  u32 bits = __float_as_uint(v);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
VX_DEV float from_order(u32 order) {
  return __uint_as_float(order >> 31 ? order ^ 0x80000000u : ~order);
}

// The least finite logit whose x is no less: thresholds are compared with logits, which takes no division.
VX_DEV float least_logit(float x, float greatest, float temperature) {
  u32 low = order_of(LEAST_FLOAT), high = order_of(greatest);
  while (low < high) {
    u32 middle = low + (high - low) / 2;
    if (tempered(from_order(middle), greatest, temperature) >= x) high = middle;
    else low = middle + 1;
  }
  return from_order(low);
}

struct Found {
  u32 bin;     // where the sum reaches the target; BINS: nowhere
  u64 before;  // the sum of all bins before it
  u64 total;
};
struct Scan {
  u64 warp_sums[32];
  Found found;
};

// Where the sums of weight(0), weight(1), ... of BINS bins reach the target.
template <int THREADS, class Weight> VX_DEV Found find_bin(Scan& scan, Weight weight, u64 target) {
  constexpr int each = BINS / THREADS;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 own[each], sum = 0;
#pragma unroll
  for (int j = 0; j < each; j++) sum += own[j] = weight(threadIdx.x * each + j);
  u64 before = -sum, total = 0;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) {
    u64 other = __shfl_up_sync(VX_ALL, sum, lanes);
    if (lane >= lanes) sum += other;
  }
  if (lane == 31) scan.warp_sums[warp] = sum;
  if (threadIdx.x == 0) scan.found = {BINS, 0, 0};
  __syncthreads();
  before += sum;
  for (int w = 0; w < THREADS / 32; w++) {
    if (w < warp) before += scan.warp_sums[w];
    total += scan.warp_sums[w];
  }
  if (threadIdx.x == 0) scan.found.total = total;
#pragma unroll
  for (int j = 0; j < each; j++) {
    if (before < target && target <= before + own[j])
      scan.found.bin = threadIdx.x * each + j, scan.found.before = before;
    before += own[j];
  }
  __syncthreads();
  Found found = scan.found;
  __syncthreads();  // the next call writes it
  return found;
}
// Of the bins before `bin`
template <int THREADS, class Weight> VX_DEV u64 sum_before(Scan& scan, Weight weight, u32 bin) {
  return find_bin<THREADS>(scan, [&](u32 b) { return b < bin ? weight(b) : 0; }, 0).total;
}

// Logits among which a threshold is: those of lists of CANDIDATES a chunk, or (counts null) a whole row.
struct Source {
  const float* logits;
  const int* counts;
  int size;
};
template <class Use> VX_DEV void each_logit(const Source& source, Use use) {
  for (int i = threadIdx.x; i < source.size; i += ROW_THREADS)
    if (!source.counts || i % CANDIDATES < source.counts[i / CANDIDATES]) use(source.logits[i], i);
}
// Whether every chunk could list all it had to.
VX_DEV bool all_listed(const int* counts, int chunks) {
  int most = 0;
  for (int c = threadIdx.x % 32; c < chunks; c += 32) most = max(most, counts[c]);
  return !__any_sync(VX_ALL, most > CANDIDATES);
}

// What is likelier than all logits of a source.
struct Above {
  u64 count, mass;
  u64 total;  // the mass that the share is of; 0: that above and of the source
};
struct Tempering {
  float greatest, temperature;
};
struct Selection {
  u32 words[PIECES][BINS];
  Scan scan;
};

// Which bin a magnitude falls into in each of four passes: the first by value, the others by 10 bits each of
// those that fell into the same first bin.
VX_DEV u32 bin_of(u32 size, int pass) {
  if (pass == 0) return first_bin_of(size);
  return size >> (30 - 10 * pass) & (pass == 1 ? 2047u : 1023u);
}

// The magnitude at which the weights of all x no less reach the target; `limit` where they do not.
// MASSES 0: counts, target is a number of ids. MASSES 1: share is that of the mass.
template <int MASSES>
VX_DEV u32 limit_of(Selection& s, const Source& source, Tempering by, u32 limit, const Above& above, u64 target,
                    float share) {
  u32 first_bin = 0, prefix = 0;
  float inverse = inverse_of(by.temperature);
  for (int pass = 0; pass < 4; pass++) {
    for (int b = threadIdx.x; b < (MASSES ? PIECES : 1) * BINS; b += ROW_THREADS) (&s.words[0][0])[b] = 0;
    __syncthreads();
    each_logit(source, [&](float logit, int) {
      u32 size = size_of(tempered(logit, by.greatest, by.temperature));
      if (size > limit) return;
      if (pass > 0 && first_bin_of(size) != first_bin) return;
      if (pass > 1 && size >> (40 - 10 * pass) != prefix) return;
      u32 bin = bin_of(size, pass);
      if (!MASSES) {
        atomicAdd(&s.words[0][bin], 1u);
        return;
      }
      Mass mass = mass_of(nearly_tempered(logit, by.greatest, inverse));
#pragma unroll
      for (int p = 0; p < PIECES; p++) atomicAdd(&s.words[p][bin], mass.piece[p]);
    });
    __syncthreads();
    auto weight = [&](u32 b) {
      return MASSES ? joined(s.words[0][b], s.words[1][b], s.words[2][b]) : (u64)s.words[0][b];
    };
    if (MASSES && pass == 0) {
      u64 of = above.total ? above.total : above.mass + find_bin<ROW_THREADS>(s.scan, weight, 0).total;
      target = max((u64)ceil((double)share * (double)of), (u64)1) - above.mass;
    } else if (pass == 0) {
      target -= above.count;
    }
    Found found = find_bin<ROW_THREADS>(s.scan, weight, target);
    if (found.bin == BINS) return limit;
    if (pass == 0) first_bin = found.bin;
    else if (pass == 1) prefix = found.bin;
    else prefix = prefix << 10 | found.bin;
    target -= found.before;
  }
  return prefix;
}
