// How much room attention within segments needs.
#include "attention.h"
#include "segment_attention.h"

// Bytes of VxSegmentAttention::workspace for steps of up to so many tokens in up to so many rows of at most
// max_length tokens each.
extern "C" VX_EXPORT size_t vx_segment_workspace_bytes(int32_t num_kv_heads, int32_t head_size, int32_t max_tokens,
                                                       int32_t max_rows, int32_t max_length, int32_t dtype) {
  typedef vx::SegmentRoom Room;
  const int32_t longest = max_length < max_tokens ? max_length : max_tokens;
  return Room(vx_k_page_bytes(num_kv_heads, head_size, Room::PAGE, dtype),
              vx_v_page_bytes(num_kv_heads, head_size, Room::PAGE, dtype), max_tokens, max_rows,
              (longest + Room::PAGE - 1) / Room::PAGE)
      .bytes;
}
