// VX: per instruction set
// Kernels for weights with a scale and a zero for each unit of columns (GPTQ, AWQ, int8).
#include "family_kernel.h"

namespace vx {
namespace VX_ISA {

const Kernel* affine_kernel(int32_t kind, int32_t rows) { return family_kernel<layout::AFFINE>(kind, rows); }

}  // namespace VX_ISA
}  // namespace vx
