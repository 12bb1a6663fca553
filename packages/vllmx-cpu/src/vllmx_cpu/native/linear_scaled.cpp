// VX: per instruction set
// Kernels for weights of one scale for each 32 columns (GGUF).
#include "family_kernel.h"

namespace vx {
namespace VX_ISA {

const Kernel* scaled_kernel(int32_t kind, int32_t rows) { return family_kernel<layout::SCALED>(kind, rows); }

}  // namespace VX_ISA
}  // namespace vx
