// VX: per instruction set
// This instruction set's table of ops, which dispatch.cpp picks from.
#include "attention.h"
#include "kernels.h"
#include "sampler.h"

namespace vx {
namespace VX_ISA {

const VxKernels* kernels() {
  static const VxKernels table = {linear, embedding, rms_norm, layer_norm,
                                  gated_act, activation, add, scale,
                                  attention, sample};
  return &table;
}

}  // namespace VX_ISA
}  // namespace vx
