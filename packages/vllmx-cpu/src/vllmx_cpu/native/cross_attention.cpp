// VX: per instruction set
// The cross_attention op: queries of a row over the rows of the feature store that its tower filled.
//
// A unit is a tile of queries of one head of one row. Keys go by in partitions with a softmax of their own, folded
// into the total in order, so a token's bits are a function of its q and the keys alone. In decode steps the unit is
// as fast as memory brings keys and values; a tile of prompt tokens reads them once for all of its queries.
#include "images.h"

#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxCrossAttention {
  const VxImages* images;
  const float* q;       // (T, H * D)
  float* y;             // (T, H * D)
  const float* keys;    // (rows, H * D) of the store
  const float* values;  // (rows, H * D)
  int32_t num_heads, head_size;
  float scale;
};

namespace {

enum { TILE = 4, PARTITION = 256, MOST_FEATURES = 512 };

struct CrossTile {
  const VxCrossAttention& a;
  int32_t start, count, first, length, head;  // queries, and rows of the store
  alignas(64) float scores[TILE][PARTITION];
  alignas(64) float total[TILE][MOST_FEATURES];
  float top[TILE], mass[TILE];

  size_t at(int32_t row) const { return ((size_t)row * a.num_heads + head) * a.head_size; }

  void run() {
    for (int32_t i = 0; i < count; ++i) {
      top[i] = -__builtin_inff(), mass[i] = 0;
      for_lanes(a.head_size, [&](int32_t d, int n) { store_some(total[i] + d, zero(), n); });
    }
    for (int32_t key = 0; key < length; key += PARTITION) {
      const int32_t n = length - key < PARTITION ? length - key : PARTITION;
      score(first + key, n);
      for (int32_t i = 0; i < count; ++i) weigh(i, n);
      add_values(first + key, n);
    }
    for (int32_t i = 0; i < count; ++i) {
      const F32x16 share = splat(length ? 1.0f / mass[i] : 0.0f);
      float* y = a.y + at(start + i);
      for_lanes(a.head_size, [&](int32_t d, int n) { store_some(y + d, load_some(total[i] + d, n) * share, n); });
    }
  }

  void score(int32_t row, int32_t n) {
    for (int32_t k = 0; k < n; ++k) {
      const float* key = a.keys + at(row + k);
      for (int32_t i = 0; i < count; ++i) {
        const float* q = a.q + at(start + i);
        F32x16 sum = zero();
        for_lanes(a.head_size, [&](int32_t d, int m) { sum = fma(load_some(q + d, m), load_some(key + d, m), sum); });
        scores[i][k] = reduce_add(sum) * a.scale;
      }
    }
  }

  // Scores become weights under the greatest score so far, to which the total is rescaled.
  void weigh(int32_t i, int32_t n) {
    float greatest = top[i];
    for (int32_t k = 0; k < n; ++k) greatest = scores[i][k] > greatest ? scores[i][k] : greatest;
    const float old = top[i] == greatest ? 1.0f : __builtin_expf(top[i] - greatest);
    for_lanes(a.head_size, [&](int32_t d, int m) { store_some(total[i] + d, load_some(total[i] + d, m) * splat(old), m); });
    top[i] = greatest;
    float sum = 0;
    for_lanes(n, [&](int32_t k, int m) {
      store_some(scores[i] + k, exp(load_some(scores[i] + k, m) - splat(greatest)), m);
      for (int j = 0; j < m; ++j) sum += scores[i][k + j];
    });
    mass[i] = mass[i] * old + sum;
  }

  void add_values(int32_t row, int32_t n) {
    for (int32_t k = 0; k < n; ++k) {
      const float* value = a.values + at(row + k);
      for (int32_t i = 0; i < count; ++i) {
        const F32x16 weight = splat(scores[i][k]);
        for_lanes(a.head_size, [&](int32_t d, int m) {
          store_some(total[i] + d, fma(weight, load_some(value + d, m), load_some(total[i] + d, m)), m);
        });
      }
    }
  }
};

}  // namespace

void cross_attention(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxCrossAttention& a = *(const VxCrossAttention*)args;
  const int32_t* rows = a.images->cross_rows;
  int32_t row = 0, before = 0;  // units of the rows before `row`
  for (int32_t unit; row < step->R && (unit = vx_next(ctx), true);) {
    int32_t tiles = 0;
    for (; row < step->R; ++row, before += tiles * a.num_heads) {
      tiles = (step->query_start[row + 1] - step->query_start[row] + TILE - 1) / TILE;
      if (unit < before + tiles * a.num_heads) break;
    }
    if (row == step->R) break;
    const int32_t tile = (unit - before) / a.num_heads, start = step->query_start[row] + tile * TILE;
    const int32_t left = step->query_start[row + 1] - start;
    CrossTile found = {a, start, left < TILE ? left : TILE, rows ? rows[2 * row] : 0, rows ? rows[2 * row + 1] : 0,
                       (unit - before) % a.num_heads, {}, {}, {}, {}};
    found.run();
  }
}
VX_OP(cross_attention, VxCrossAttention)

struct VxUnfold {
  const float* x;  // (T, x_frames * channels)
  const float* y;  // (T, y_frames * channels), or null
  float* out;      // (T, 3 * channels)
  int32_t channels, x_frames, y_frames, first;
};

void unfold(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxUnfold& a = *(const VxUnfold*)args;
  const int32_t frames = a.x_frames + a.y_frames;
  for (int32_t sequence; (sequence = vx_next(ctx)) < step->R * 8;) {  // an eighth of a row at a time
    const int32_t begin = step->query_start[sequence / 8], end = step->query_start[sequence / 8 + 1];
    const int32_t each = (end - begin + 7) / 8, from = begin + sequence % 8 * each;
    for (int32_t row = from; row < from + each && row < end; ++row) {
      for (int32_t k = 0; k < 3; ++k) {
        const int32_t at = row * frames + a.first + k;
        const bool inside = at >= begin * frames && at < end * frames;
        const int32_t owner = inside ? at / frames : 0, place = at - owner * frames;
        const float* x = place < a.x_frames
                             ? a.x + ((size_t)owner * a.x_frames + place) * a.channels
                             : a.y + ((size_t)owner * a.y_frames + place - a.x_frames) * a.channels;
        float* out = a.out + (size_t)row * 3 * a.channels + k;
        for (int32_t c = 0; c < a.channels; ++c) out[3 * c] = inside ? x[c] : 0.0f;
      }
    }
  }
}
VX_OP(unfold, VxUnfold)

}  // namespace VX_ISA
}  // namespace vx
