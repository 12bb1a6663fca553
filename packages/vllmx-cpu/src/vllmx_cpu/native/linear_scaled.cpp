// VX: per instruction set
// `linear` for weights of one scale for each 32 columns (GGUF).
#include "linear_families.h"
#include "linear_run.h"

namespace vx {
namespace VX_ISA {

void linear_scaled(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx) {
  run_family<layout::SCALED>(a, step, rows, ctx);
}

}  // namespace VX_ISA
}  // namespace vx
