// The threshold of a row's draw by min_p, top_k and top_p: what the draw takes is no less.
// sample_count:     counts and masses of the row's bins by x = (logit - greatest) / temperature.
// sample_collect:   lists the logits of the bins in which the threshold must lie.
// sample_threshold: finds it among them, and leaves the bins zero.
//
// Layout: logits (L, V) of f32; chunk results (L, chunks); row parameters (L); bin_counts and bin_masses (L, 2048),
//         0 before and after; listed (L, chunks) numbers, lists (L, chunks, 256). min_x is ln(min_p) as the host
//         rounds it to f32, -inf where off. Fewer than 2^19 ids.
// Grid:   (L, chunks) of 256 threads; (L) of 512 for sample_threshold.
// Floor:  bytes: every logit once in each of the first two. Rows without top_k and top_p end at once there.
//
// No sort, and no division for an id. Where a chunk has more than 256 ids in these bins (flat logits),
// sample_threshold reads the whole row.
#include "sample_select.h"
#include "vx.h"

struct Filters {
  float min_x, top_p;
  int top_k;
};
VX_DEV bool wants_bins(const Filters& f) { return f.top_k > 0 || f.top_p < 1.f; }
VX_DEV u32 least_size(const Filters& f) { return min(size_of(f.min_x), MINUS_INFINITY_SIZE - 1); }

// Bins first .. last hold the threshold. first is BINS where no row's filter takes anything off.
struct Frame {
  u32 first, last;
  Above above;
  bool by_count;  // top_k takes something off
};
template <int THREADS>
VX_DEV Frame frame_of(Scan& scan, const u32* counts, const u64* masses, const Filters& f) {
  auto count = [&](u32 b) { return (u64)counts[b]; };
  auto mass = [&](u32 b) { return masses[b]; };
  Frame frame = {BINS, BINS, {0, 0, 0}, false};
  if (f.top_k > 0) frame.first = frame.last = find_bin<THREADS>(scan, count, f.top_k).bin;
  frame.by_count = frame.last < BINS;
  if (f.top_p < 1.f) {
    // of at least this mass: that before the bin of top_k, if there is one
    u64 least = sum_before<THREADS>(scan, mass, frame.last);
    u64 wanted = max((u64)ceil((double)f.top_p * (double)least), (u64)1);
    u32 bin = find_bin<THREADS>(scan, mass, wanted).bin;
    frame.first = min(frame.first, bin);
    if (!frame.by_count) frame.last = bin, frame.above.total = least;
  }
  frame.above.count = sum_before<THREADS>(scan, count, frame.first);
  frame.above.mass = sum_before<THREADS>(scan, mass, frame.first);
  return frame;
}

VX_DEV bool is_drawn(float greatest, float temperature, int target) {
  return target < 0 && temperature != 0.f && is_finite(greatest);
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
sample_count(const float* __restrict__ logits, const float* __restrict__ chunk_max,
             const int* __restrict__ chunk_argmax, const float* __restrict__ temperature,
             const float* __restrict__ min_x, const int* __restrict__ top_k, const float* __restrict__ top_p,
             const int* __restrict__ target, u32* bin_counts, u64* bin_masses, int vocab) {
  __shared__ u32 words[1 + PIECES][BINS];
  __shared__ float least;
  int row = blockIdx.x, first = blockIdx.y * CHUNK, last = min(first + CHUNK, vocab);
  Filters filters = {min_x[row], top_p[row], top_k[row]};
  float greatest = row_best(chunk_max, chunk_argmax, row, gridDim.y).value;
  if (!is_drawn(greatest, temperature[row], target[row]) || !wants_bins(filters)) return;
  for (int b = threadIdx.x; b < (1 + PIECES) * BINS; b += CHUNK_THREADS) (&words[0][0])[b] = 0;
  if (threadIdx.x == 0) least = least_logit(filters.min_x, greatest, temperature[row]);
  __syncthreads();
  float inverse = inverse_of(temperature[row]);
  for (int id = first + threadIdx.x; id < last; id += CHUNK_THREADS) {
    float logit = logits[(size_t)row * vocab + id];
    if (!(logit >= least)) continue;
    float x = nearly_tempered(logit, greatest, inverse);
    u32 bin = first_bin_of(size_of(x));
    Mass mass = mass_of(x);
    atomicAdd(&words[0][bin], 1u);
#pragma unroll
    for (int p = 0; p < PIECES; p++)
      if (mass.piece[p]) atomicAdd(&words[1 + p][bin], mass.piece[p]);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += CHUNK_THREADS) {
    if (!words[0][b]) continue;
    atomicAdd(bin_counts + (size_t)row * BINS + b, words[0][b]);
    atomicAdd(bin_masses + (size_t)row * BINS + b, joined(words[1][b], words[2][b], words[3][b]));
  }
}
VX_EXPORT(sample_count)

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
sample_collect(const float* __restrict__ logits, const float* __restrict__ chunk_max,
               const int* __restrict__ chunk_argmax, const float* __restrict__ temperature,
               const float* __restrict__ min_x, const int* __restrict__ top_k, const float* __restrict__ top_p,
               const int* __restrict__ target, const u32* __restrict__ bin_counts,
               const u64* __restrict__ bin_masses, int* __restrict__ listed, float* __restrict__ lists,
               int vocab) {
  __shared__ Scan scan;
  __shared__ int count;
  int row = blockIdx.x, first = blockIdx.y * CHUNK, last = min(first + CHUNK, vocab);
  Filters filters = {min_x[row], top_p[row], top_k[row]};
  float greatest = row_best(chunk_max, chunk_argmax, row, gridDim.y).value;
  if (!is_drawn(greatest, temperature[row], target[row]) || !wants_bins(filters)) return;
  if (threadIdx.x == 0) count = 0;
  const u32* counts = bin_counts + (size_t)row * BINS;
  Frame frame = frame_of<CHUNK_THREADS>(scan, counts, bin_masses + (size_t)row * BINS, filters);
  float inverse = inverse_of(temperature[row]);
  size_t chunk = (size_t)row * gridDim.y + blockIdx.y;
  for (int id = first + threadIdx.x; id < last; id += CHUNK_THREADS) {
    float logit = logits[(size_t)row * vocab + id];
    u32 bin = first_bin_of(size_of(nearly_tempered(logit, greatest, inverse)));
    if (bin < frame.first || bin > frame.last) continue;  // those below min_p are not asked for
    int slot = atomicAdd(&count, 1);
    if (slot < CANDIDATES) lists[chunk * CANDIDATES + slot] = logit;
  }
  __syncthreads();
  if (threadIdx.x == 0) listed[chunk] = count;
}
VX_EXPORT(sample_collect)

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1)
sample_threshold(const float* __restrict__ logits, const float* __restrict__ chunk_max,
                 const int* __restrict__ chunk_argmax, const float* __restrict__ temperature,
                 const float* __restrict__ min_x, const int* __restrict__ top_k,
                 const float* __restrict__ top_p, const int* __restrict__ target, u32* bin_counts,
                 u64* bin_masses, const int* __restrict__ listed, const float* __restrict__ lists,
                 float* __restrict__ threshold, int vocab, int chunks) {
  __shared__ Selection selection;
  int row = blockIdx.x;
  Filters filters = {min_x[row], top_p[row], top_k[row]};
  float greatest = row_best(chunk_max, chunk_argmax, row, chunks).value;
  if (!is_drawn(greatest, temperature[row], target[row])) return;
  Tempering by = {greatest, temperature[row]};
  u32 limit = least_size(filters);
  if (wants_bins(filters)) {
    u32* counts = bin_counts + (size_t)row * BINS;
    u64* masses = bin_masses + (size_t)row * BINS;
    Frame frame = frame_of<ROW_THREADS>(selection.scan, counts, masses, filters);
    for (int b = threadIdx.x; b < BINS; b += ROW_THREADS) counts[b] = 0, masses[b] = 0;
    const int* own = listed + (size_t)row * chunks;
    Source source = {lists + (size_t)row * chunks * CANDIDATES, own, chunks * CANDIDATES};
    if (!all_listed(own, chunks)) {
      source = {logits + (size_t)row * vocab, nullptr, vocab};
      frame.above = {0, 0, 0};
    }
    if (frame.by_count) limit = limit_of<0>(selection, source, by, limit, frame.above, filters.top_k, 0.f);
    if (filters.top_p < 1.f) limit = limit_of<1>(selection, source, by, limit, frame.above, 0, filters.top_p);
  }
  if (threadIdx.x == 0) threshold[row] = least_logit(-__uint_as_float(limit), greatest, temperature[row]);
}
VX_EXPORT(sample_threshold)
