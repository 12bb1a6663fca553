// VX: per instruction set
// `linear` for float8 weights.
#include "linear_families.h"
#include "linear_run.h"

namespace vx {
namespace VX_ISA {

void linear_float8(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  run_family<layout::FLOAT8>(a, step, rows, ctx);
}

}  // namespace VX_ISA
}  // namespace vx
