// VX: per instruction set
// Three convolutions of 3 x 3 values by steps of 2 over times and bins, each with GELU behind it, chunk by
// chunk: the values that one reads are brought side by side and multiplied. All but the last result of a
// chunk stay in the workspace, which the second-level caches nearly hold.
#include "products.h"
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxDownsample {
  VxWeight w[3];      // (channels, 9 channels before): times, bins, channels
  const float* x;     // (T, FRAMES * bins)
  float* y;           // (T, bins behind all * channels)
  void* panels;       // room for the packed values that the largest product reads
  float* workspace;   // what the first two leave of a chunk, then the values that one reads
  int32_t frames;     // of a chunk
  int32_t bins;
};

namespace {

enum { FRAMES = 8 };

int32_t half(int32_t n) { return (n + 1) / 2; }

// Times, bins and channels; times from `known` on are zeros, as are all values outside.
struct Grid {
  const float* values;
  int32_t known, bins, channels;
};

// The values that are read for each of `times` times and half of the bins.
void unfold(const Grid& from, int32_t times, float* to, VxCtx* ctx) {
  const int32_t bins = half(from.bins), size = from.channels;
  for (int32_t time; (time = vx_next(ctx)) < times;) {
    float* out = to + (size_t)time * bins * 9 * size;
    for (int32_t bin = 0; bin < bins; ++bin) {
      for (int32_t tap = 0; tap < 9; ++tap, out += size) {
        const int32_t t = 2 * time + tap / 3 - 1, b = 2 * bin + tap % 3 - 1;
        if (t < 0 || t >= from.known || b < 0 || b >= from.bins)
          __builtin_memset(out, 0, size * sizeof(float));
        else
          __builtin_memcpy(out, from.values + ((size_t)t * from.bins + b) * size, size * sizeof(float));
      }
    }
  }
  vx_barrier(ctx);
}

}  // namespace

void downsample(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxDownsample& a = *(const VxDownsample*)args;
  const int32_t rows = (a.frames + FRAMES - 1) / FRAMES;
  const int32_t times[2] = {half(a.frames), half(half(a.frames))};
  const int32_t bins[3] = {half(a.bins), half(half(a.bins)), half(half(half(a.bins)))};
  float* kept[2] = {a.workspace, a.workspace + (size_t)times[0] * bins[0] * a.w[0].rows};
  float* read = kept[1] + (size_t)times[1] * bins[1] * a.w[1].rows;
  for (int32_t sequence = 0; sequence < step->R; ++sequence) {
    const int32_t end = step->query_start[sequence + 1];
    for (int32_t first = step->query_start[sequence]; first < end; first += rows) {
      const int32_t count = end - first < rows ? end - first : rows;
      const int32_t known = count * FRAMES < a.frames ? count * FRAMES : a.frames;
      Grid grid = {a.x + (size_t)first * FRAMES * a.bins, known, a.bins, 1};
      for (int32_t i = 0; i < 3; ++i) {
        // No more than what the rows of a chunk that ends early read.
        int32_t made = count << (2 - i);
        if (i < 2 && made > times[i]) made = times[i];
        float* to = i < 2 ? kept[i] : a.y + (size_t)first * bins[2] * a.w[2].rows;
        unfold(grid, made, read, ctx);
        Part all = {0, 0, made * bins[i], 0, false};
        const Product product = {a.w[i], {VX_GELU, 0.0f, 0.0f, 1.0f}, read, nullptr, made * bins[i], to, a.w[i].rows};
        run_products({product, a.panels, &all, 1}, ctx);
        vx_barrier(ctx);
        grid = {to, made, bins[i], a.w[i].rows};
      }
    }
  }
}
VX_OP(downsample, VxDownsample)

}  // namespace VX_ISA
}  // namespace vx
