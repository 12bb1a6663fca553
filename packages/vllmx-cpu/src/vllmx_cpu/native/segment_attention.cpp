// VX: per instruction set
// The segment_attention op: the step as one whose cache is the workspace, then attention over that.
#include "segment_attention.h"

#include "attention.h"

namespace vx {
namespace VX_ISA {
namespace {

int32_t length_of(const VxStep& step, int32_t row) { return step.query_start[row + 1] - step.query_start[row]; }

int32_t pages_of(int32_t length) { return (length + SegmentRoom::PAGE - 1) / SegmentRoom::PAGE; }

// The arrays of the step that attention sees, in the workspace.
struct Segments {
  int32_t *places, *slots, *lengths, *tables, width;

  // Row `row`, whose pages begin with `page`.
  void fill(const VxStep& step, int32_t row, int32_t page) const {
    const int32_t start = step.query_start[row], length = length_of(step, row);
    for (int32_t i = 0; i < length; ++i) {
      places[start + i] = i;
      slots[start + i] = page * SegmentRoom::PAGE + i;
    }
    lengths[row] = length;
    for (int32_t i = 0; i < pages_of(length); ++i) tables[(size_t)row * width + i] = page + i;
  }

  // All rows, shared among the threads.
  void fill_all(const VxStep& step, VxCtx* ctx) const {
    int32_t row = 0, page = 0;
    for (int32_t mine; (mine = vx_next(ctx)) < step.R;) {
      for (; row < mine; ++row) page += pages_of(length_of(step, row));
      fill(step, row, page);
    }
  }
};

int32_t longest_row(const VxStep& step) {
  int32_t longest = 0;
  for (int32_t row = 0; row < step.R; ++row)
    if (length_of(step, row) > longest) longest = length_of(step, row);
  return longest;
}

}  // namespace

void segment_attention(const void* args, const VxStep* given, VxCtx* ctx) {
  const VxSegmentAttention& s = *(const VxSegmentAttention*)args;
  VxStep step = *given;
  if (s.images) step.query_start = s.images->windows, step.R = s.images->num_windows;
  const int32_t width = pages_of(longest_row(step));
  const size_t key_bytes = vx_k_page_bytes(s.num_kv_heads, s.head_size, SegmentRoom::PAGE, s.dtype);
  const size_t value_bytes = vx_v_page_bytes(s.num_kv_heads, s.head_size, SegmentRoom::PAGE, s.dtype);
  const SegmentRoom room(key_bytes, value_bytes, step.T, step.R, width);
  uint8_t* base = (uint8_t*)s.workspace;
  if (room.bytes > s.workspace_bytes) __builtin_trap();  // the limits of a step were not kept
  const Segments segments = {(int32_t*)(base + room.places), (int32_t*)(base + room.slots),
                             (int32_t*)(base + room.lengths), (int32_t*)(base + room.tables), width};
  if (s.piece == 0) {
    segments.fill_all(step, ctx);
    vx_barrier(ctx);
  }
  PagedAttention a = {};
  a.qkv = s.qkv, a.out = s.out, a.out_dtype = VX_F32;
  a.num_heads = s.num_heads, a.num_kv_heads = s.num_kv_heads, a.head_size = s.head_size;
  a.rope = s.rope, a.rotary_dim = s.rotary_dim, a.interleaved = s.interleaved;
  a.rope_rows = s.rope_rows ? s.rope_rows : step.positions;
  a.block_size = SegmentRoom::PAGE, a.kv_dtype = s.dtype;
  a.window = s.window, a.scale = s.scale;
  a.piece = s.piece, a.pieces = s.pieces;
  a.bias = s.bias, a.bias_length = s.bias_length;
  a.k_pages = base + room.keys, a.v_pages = base + room.values;
  step.positions = segments.places, step.slots = segments.slots, step.context_len = segments.lengths;
  step.block_tables = segments.tables, step.B = step.block_stride = width;
  attend_step(a, step, ctx);
}
VX_OP(segment_attention, VxSegmentAttention)

}  // namespace VX_ISA
}  // namespace vx
