// VX: per instruction set
// Kernels for weights that are not quantised.
#include "dense_linear.h"
#if defined(__AMX_BF16__)
#include "tile_dense_linear.h"
#endif

namespace vx {
namespace VX_ISA {

const Kernel* dense_kernel(int32_t kind) {
  switch (kind) {
    case VX_F32: return &DenseKernel<WeightF32>::kernel;
    case VX_F16: return &DenseKernel<WeightF16>::kernel;
#if defined(__AMX_BF16__)
    default: return &DenseTileKernel::kernel;
#else
    default: return &DenseKernel<WeightBf16>::kernel;
#endif
  }
}

}  // namespace VX_ISA
}  // namespace vx
