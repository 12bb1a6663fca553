// VX: per instruction set
// y = x W^T for packed weights, with what follows it fused in: bias, gated activation, softcap.
#include "linear_families.h"
#include "linear_run.h"
#if defined(__AMX_BF16__)
#include "tile_dense_linear.h"
#endif

namespace vx {
namespace VX_ISA {

void linear(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxLinear* a = (const VxLinear*)args;
  const int32_t rows = a->logit_rows ? step->L : step->T;
  if (rows == 0) return;
  switch (a->w.kind) {
    case VX_F32: return run_linear<WeightF32>(a, step, rows, ctx);
    case VX_F16: return run_linear<WeightF16>(a, step, rows, ctx);
#if defined(__AMX_BF16__)
    case VX_BF16: return run_dense_tiles(a, step, rows, ctx);
#else
    case VX_BF16: return run_linear<WeightBf16>(a, step, rows, ctx);
#endif
  }
  layout::visit_format(a->w.kind, 0, [=](auto format) {
    switch (decltype(format)::FAMILY) {
      case layout::SCALED: linear_scaled(a, step, rows, ctx); break;
      case layout::SUPER: linear_super(a, step, rows, ctx); break;
      case layout::AFFINE: linear_affine(a, step, rows, ctx); break;
      case layout::FLOAT8: linear_float8(a, step, rows, ctx); break;
    }
    return 0;
  });
}
VX_OP(linear, VxLinear)

}  // namespace VX_ISA
}  // namespace vx
