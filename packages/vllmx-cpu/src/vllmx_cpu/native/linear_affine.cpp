// VX: per instruction set
// `linear` for weights with a scale and a zero for each unit of columns (GPTQ, AWQ, int8).
#include "linear_families.h"
#include "linear_run.h"

namespace vx {
namespace VX_ISA {

void linear_affine(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  run_family<layout::AFFINE>(a, step, rows, ctx);
}

}  // namespace VX_ISA
}  // namespace vx
