// VX: per instruction set
// Kernels for weights in units of 256 columns with scales of their groups (GGUF).
#include "family_kernel.h"

namespace vx {
namespace VX_ISA {

const Kernel* super_kernel(int32_t kind, int32_t rows) { return family_kernel<layout::SUPER>(kind, rows); }

}  // namespace VX_ISA
}  // namespace vx
