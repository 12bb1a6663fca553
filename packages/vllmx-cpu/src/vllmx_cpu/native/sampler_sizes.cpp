// The size of the sampler's workspace.
#include "sampler_space.h"

size_t vx_sampler_workspace_bytes(int32_t vocab_size, int32_t nth) {
  vx::SamplerSlot* slot;
  vx::SamplerArrays arrays;
  return vx::carve_sampler_slot(nullptr, vocab_size, &slot, &arrays) * (size_t)nth;
}
