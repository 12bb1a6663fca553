// VX: per instruction set
// `linear` for weights in units of 256 columns with scales of their groups (GGUF).
#include "linear_families.h"
#include "linear_run.h"

namespace vx {
namespace VX_ISA {

void linear_super(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  run_family<layout::SUPER>(a, step, rows, ctx);
}

}  // namespace VX_ISA
}  // namespace vx
