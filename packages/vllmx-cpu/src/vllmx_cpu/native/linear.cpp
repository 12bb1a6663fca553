// VX: per instruction set
// y = x W^T for packed weights, with what follows it fused in: bias, activation, softcap.
#include "products.h"

namespace vx {
namespace VX_ISA {

void linear(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxLinear* a = (const VxLinear*)args;
  const int32_t rows = a->logit_rows ? step->L : step->T;
  if (rows == 0) return;
  const int32_t width = a->w.gated && a->activation != VX_NONE ? a->w.rows / 2 : a->w.rows;
  const Finish finish = {a->activation, a->softcap, 0.0f, 1.0f};
  const Product product = {a->w, finish, a->x, a->logit_rows ? step->logit_rows : nullptr,
                           rows, a->y, a->stride ? a->stride : width};
  Part all = {0, 0, rows, 0, false};
  run_products({product, a->panels, &all, 1}, ctx);
}
VX_OP(linear, VxLinear)

}  // namespace VX_ISA
}  // namespace vx
