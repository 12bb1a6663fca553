// `linear` of the families of quantised weights (block_layout.h), each in a source of its own: together
// they would compile for minutes.
#pragma once
#include "ops.h"

namespace vx {
namespace VX_ISA {

void linear_scaled(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx);
void linear_super(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx);
void linear_affine(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx);
void linear_float8(const VxLinear* a, const VxStep* step, int32_t rows, VxCtx* ctx);

}  // namespace VX_ISA
}  // namespace vx
