// VX: per instruction set
// y = x * w, a value of w for each `span` neighbouring features.
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxScaleBy {
  const float* x;  // (T, width)
  const float* w;  // (width / span)
  float* y;        // (T, width)
  int32_t width, span;
};

void scale_by(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxScaleBy* a = (const VxScaleBy*)args;
  for_rows(step, ctx, [=](int32_t row) {
    const float* x = a->x + (size_t)row * a->width;
    float* y = a->y + (size_t)row * a->width;
    if (a->span == 1)
      for_lanes(a->width, [=](int32_t i, int n) {
        store_some(y + i, load_some(x + i, n) * load_some(a->w + i, n), n);
      });
    else
      for (int32_t begin = 0; begin < a->width; begin += a->span) {
        const F32x16 factor = splat(a->w[begin / a->span]);
        for_lanes(a->span, [=](int32_t i, int n) {
          store_some(y + begin + i, load_some(x + begin + i, n) * factor, n);
        });
      }
  });
}
VX_OP(scale_by, VxScaleBy)

}  // namespace VX_ISA
}  // namespace vx
