// VX: per instruction set
// Ops of models that see images: the arrays of a step, rotations with axes, patches, and the store of features.
//
// All copy or add rows; threads draw groups of them. The store has float32 rows for each part.
#include "images.h"

#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxSee {
  VxImages* ops;   // where the recorded ops look
  VxImages step;
};

struct VxTurn {
  const VxImages* images;
  const float* table;    // (positions, 2 * half) cos | sin
  const int32_t* axes;   // (half) line of rope_positions for each frequency
  float* y;              // (T, 2 * half) of each token
  int32_t half;
};

struct VxPatches {
  const VxImages* images;
  float* y;        // (T, width)
  int32_t width;
};

struct VxMerge {
  const float* x;  // (count * L, width)
  float* y;        // (L, width)
  int32_t width, count;
};

// One part of the store.
struct VxFeatures {
  const VxImages* images;
  const float* x;  // (T, width), of `keep` (L, width)
  float* y;        // (T, width); null for `keep` and `tap`
  float* store;    // (rows, width)
  int32_t width;
  int32_t adds;
  int32_t own;     // `place` reads own_rows
};

void see(const void* args, const VxStep*, VxCtx* ctx) {
  const VxSee& a = *(const VxSee*)args;
  if (ctx->tid == 0) *a.ops = a.step;
}
VX_OP(see, VxSee)

void turn(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxTurn& a = *(const VxTurn*)args;
  const int32_t* turned = a.images->rope_positions;
  for_rows(step, ctx, [=](int32_t row) {
    float* y = a.y + (size_t)row * 2 * a.half;
    for (int32_t i = 0; i < a.half; ++i) {
      const int32_t at = turned ? turned[(size_t)a.axes[i] * step->T + row] : step->positions[row];
      const float* line = a.table + (size_t)at * 2 * a.half;
      y[i] = line[i];
      y[a.half + i] = line[a.half + i];
    }
  });
}
VX_OP(turn, VxTurn)

void patches(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxPatches& a = *(const VxPatches*)args;
  const float* x = a.images->patches;
  for_rows(step, ctx, [=](int32_t row) {
    const size_t at = (size_t)row * a.width;
    __builtin_memcpy(a.y + at, x + at, (size_t)a.width * sizeof(float));
  });
}
VX_OP(patches, VxPatches)

// The mean of `count` neighbours.
void merge(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxMerge& a = *(const VxMerge*)args;
  const F32x16 share = splat(1.0f / (float)a.count);
  for (int32_t row; (row = vx_next(ctx)) < step->T / a.count;) {
    const float* x = a.x + (size_t)row * a.count * a.width;
    for_lanes(a.width, [=](int32_t i, int n) {
      F32x16 total = load_some(x + i, n);
      for (int32_t k = 1; k < a.count; ++k) total = total + load_some(x + (size_t)k * a.width + i, n);
      store_some(a.y + (size_t)row * a.width + i, total * share, n);
    });
  }
}
VX_OP(merge, VxMerge)

void keep(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxFeatures& a = *(const VxFeatures*)args;
  const int32_t* rows = a.images->keep;
  for_rows(step, ctx, [=](int32_t row) {
    __builtin_memcpy(a.store + (size_t)rows[row] * a.width, a.x + (size_t)row * a.width,
                     (size_t)a.width * sizeof(float));
  });
}
VX_OP(keep, VxFeatures)

void tap(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxFeatures& a = *(const VxFeatures*)args;
  const int32_t* rows = a.images->tap_rows;
  for_rows(step, ctx, [=](int32_t row) {
    if (!rows || rows[row] < 0) return;
    __builtin_memcpy(a.store + (size_t)rows[row] * a.width, a.x + (size_t)row * a.width,
                     (size_t)a.width * sizeof(float));
  });
}
VX_OP(tap, VxFeatures)

void place(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxFeatures& a = *(const VxFeatures*)args;
  const int32_t* rows = a.own ? a.images->own_rows : a.images->feature_rows;
  for_rows(step, ctx, [=](int32_t row) {
    const float* x = a.x + (size_t)row * a.width;
    const float* kept = rows && rows[row] >= 0 ? a.store + (size_t)rows[row] * a.width : nullptr;
    float* y = a.y + (size_t)row * a.width;
    if (kept && a.adds) {
      for_lanes(a.width, [=](int32_t i, int n) { store_some(y + i, load_some(x + i, n) + load_some(kept + i, n), n); });
    } else {
      __builtin_memcpy(y, kept ? kept : x, (size_t)a.width * sizeof(float));
    }
  });
}
VX_OP(place, VxFeatures)

}  // namespace VX_ISA
}  // namespace vx
