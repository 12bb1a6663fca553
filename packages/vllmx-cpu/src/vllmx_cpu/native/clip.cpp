// VX: per instruction set
// y = x between two numbers, at some of the features of y; NaN stays NaN.
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxClip {
  const float* x;       // (T, width)
  const float* bounds;  // lowest, highest
  float* y;             // (T, pitch), from the first feature on
  int32_t width, pitch;
};

void clip(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxClip* a = (const VxClip*)args;
  const F32x16 low = splat(a->bounds[0]), high = splat(a->bounds[1]);
  for_rows(step, ctx, [=](int32_t row) {
    const float* x = a->x + (size_t)row * a->width;
    float* y = a->y + (size_t)row * a->pitch;
    for_lanes(a->width, [=](int32_t i, int n) {
      const F32x16 v = load_some(x + i, n), raised = select(v < low, low, v);
      store_some(y + i, select(raised > high, high, raised), n);
    });
  });
}
VX_OP(clip, VxClip)

}  // namespace VX_ISA
}  // namespace vx
