// How much room latent attention needs between its phases.
#include "latent_attention.h"

#define VX_API extern "C" VX_EXPORT

// Bytes of VxLatentAttention::workspace with which contexts of up to max_context tokens use all threads.
VX_API size_t vx_latent_workspace_bytes(int32_t num_heads, int32_t rank, int32_t nope_size, int32_t value_size,
                                        int32_t num_picked, int32_t max_context, int32_t nth) {
  const vx::LatentRoom room(num_heads, rank, nope_size, value_size, num_picked);
  return room.states + vx_attention_workspace_bytes(num_heads, 1, rank, max_context, nth);
}
// Rows of all heads that are multiplied together, where a step has so many tokens.
VX_API int32_t vx_latent_rows(int32_t num_heads, int32_t tokens) {
  return num_heads * (tokens < vx::LatentRoom::TOKENS ? tokens : (int32_t)vx::LatentRoom::TOKENS);
}
