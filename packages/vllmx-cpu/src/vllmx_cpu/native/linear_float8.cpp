// VX: per instruction set
// Kernels for float8 weights.
#include "family_kernel.h"

namespace vx {
namespace VX_ISA {

const Kernel* float8_kernel(int32_t kind, int32_t rows) { return family_kernel<layout::FLOAT8>(kind, rows); }

}  // namespace VX_ISA
}  // namespace vx
