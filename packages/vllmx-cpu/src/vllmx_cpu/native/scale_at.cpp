// VX: per instruction set
// y = x, its first `features` times the entry of a table at the token's position.
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxScaleAt {
  const float* x;      // (T, width)
  const float* table;  // (positions)
  float* y;            // (T, width)
  int32_t width, features;
};

void scale_at(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxScaleAt* a = (const VxScaleAt*)args;
  for_rows(step, ctx, [=](int32_t row) {
    const float* x = a->x + (size_t)row * a->width;
    float* y = a->y + (size_t)row * a->width;
    const F32x16 factor = splat(a->table[step->positions[row]]);
    for_lanes(a->features, [=](int32_t i, int n) {
      store_some(y + i, load_some(x + i, n) * factor, n);
    });
    for_lanes(a->width - a->features, [=](int32_t i, int n) {
      store_some(y + a->features + i, load_some(x + a->features + i, n), n);
    });
  });
}
VX_OP(scale_at, VxScaleAt)

}  // namespace VX_ISA
}  // namespace vx
