// Sizes of what the attention op needs: pages and workspace. Layout: attention.h.
#include "attention.h"

static size_t padded(int32_t head_size) { return ((size_t)head_size + 15) / 16 * 16; }

static size_t page_bytes(int32_t num_kv_heads, size_t width, int32_t block_size, int32_t kv_dtype) {
  size_t vectors = (size_t)num_kv_heads * block_size;
  if (kv_dtype == VX_KV_INT8 || kv_dtype == VX_KV_FP8) return vectors * (width + sizeof(float));
  if (kv_dtype == VX_KV_Q4) return vectors * (width / 2 + sizeof(float));
  return vectors * width * (kv_dtype == VX_F32 ? 4 : 2);
}

size_t vx_k_page_bytes(int32_t num_kv_heads, int32_t head_size, int32_t block_size, int32_t kv_dtype) {
  return page_bytes(num_kv_heads, head_size, block_size, kv_dtype == VX_KV_INT8_Q4 ? (int32_t)VX_KV_INT8 : kv_dtype);
}

size_t vx_v_page_bytes(int32_t num_kv_heads, int32_t head_size, int32_t block_size, int32_t kv_dtype) {
  return page_bytes(num_kv_heads, padded(head_size), block_size, kv_dtype == VX_KV_INT8_Q4 ? (int32_t)VX_KV_Q4 : kv_dtype);
}

size_t vx_attention_workspace_bytes(int32_t num_heads, int32_t num_kv_heads, int32_t head_size,
                                    int32_t max_context, int32_t nth) {
  if (nth == 1) return 0;
  // At most 2 * nth units are cut (each costs more than 1 / (2 * nth) of the step), plus the rest of
  // the last tile's kv heads; each keeps a state for every partition and query head.
  size_t partitions = (size_t)max_context / 256 + 2, heads = num_heads / num_kv_heads;
  size_t units = 2 * (size_t)nth + num_kv_heads;
  size_t bytes = units * partitions * heads * (padded(head_size) + 16) * sizeof(float);
  size_t limit = (size_t)64 << 20;
  return bytes < limit ? bytes : limit;
}
