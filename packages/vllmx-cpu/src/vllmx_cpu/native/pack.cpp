// Repacks a row-major matrix into the tiles that product.h reads. Runs once, at load.
#include "block_layout.h"
#include "simd.h"
#include "team.h"

using namespace vx::VX_ISA;

namespace {

// 16 values of a source row as float32; lanes beyond n are 0.
F32x16 read_source(const uint8_t* row, int32_t kind, int32_t k, int32_t n) {
  if (kind == VX_F32) return load_n((const float*)row + k, n);
  uint16_t words[16] = {0};
  __builtin_memcpy(words, (const uint16_t*)row + k, (size_t)n * 2);
  return kind == VX_F16 ? load_f16(words) : load_bf16(words);
}

// Sixteen values of one row into its lane of a block that begins at `block`.
void write_lane(uint8_t* block, int32_t kind, int32_t k, int32_t n, int32_t lane, F32x16 v) {
  if (kind == VX_F32) {
    float values[16];
    store(values, v);
    for (int32_t i = 0; i < n; ++i) ((float*)block)[(size_t)(k + i) * 16 + lane] = values[i];
    return;
  }
  uint16_t words[16];
  kind == VX_F16 ? store_f16(words, v) : store_bf16(words, v);
  uint16_t* out = (uint16_t*)block;
  for (int32_t i = 0; i < n; ++i) {
    const size_t at = (size_t)(k + i);
    out[kind == VX_F16 ? at * 16 + lane : at / 2 * 32 + lane * 2 + (at & 1)] = words[i];
  }
}

// Two 16-bit rows of equal kind move without conversion: the common case, bound by memory.
void copy_words(const uint16_t* row, uint16_t* block, int32_t kind, int32_t cols, int32_t lane) {
  if (kind == VX_F16) {
    for (int32_t k = 0; k < cols; ++k) block[(size_t)k * 16 + lane] = row[k];
    return;
  }
  uint32_t* pairs = (uint32_t*)block + lane;
  for (int32_t k = 0; k + 1 < cols; k += 2) __builtin_memcpy(pairs + (size_t)k * 8, row + k, 4);
  if (cols % 2) pairs[(size_t)(cols / 2) * 16] = row[cols - 1];
}

}  // namespace

// Bytes of a packed matrix of `tiles` tiles.
VX_API size_t vx_packed_bytes(int32_t tiles, int32_t cols, int32_t kind) {
  if (kind >= VX_Q4_0)
    return (size_t)tiles * 2 * vx::layout::block_bytes(kind, cols);
  const size_t units = kind == VX_BF16 ? ((size_t)cols + 1) / 2 * 2 : (size_t)cols;
  return (size_t)tiles * 32 * units * (kind == VX_F32 ? 4 : 2);
}

// Writes source rows 0 ... count - 1 (row-major, `cols` wide, VxDType source_kind) as rows `first`,
// `first + 1` ... of a packed matrix that was zero. Row r of a gated matrix of `features` gate rows
// and as many up rows goes where product.h looks for it; features 0: not gated. Thread-safe for
// different rows.
VX_API void vx_pack_rows(void* packed, int32_t kind, int32_t cols, int32_t features, const void* source,
                         int32_t source_kind, int32_t first, int32_t count) {
  const size_t units = kind == VX_BF16 ? ((size_t)cols + 1) / 2 * 2 : (size_t)cols;
  const size_t block_bytes = units * 16 * (kind == VX_F32 ? 4 : 2);
  const size_t row_bytes = (size_t)cols * (source_kind == VX_F32 ? 4 : 2);
  for (int32_t i = 0; i < count; ++i) {
    const vx::layout::Place place = vx::layout::place_of(first + i, features);
    uint8_t* out = (uint8_t*)packed + (size_t)place.block * block_bytes;
    const uint8_t* row = (const uint8_t*)source + (size_t)i * row_bytes;
    if (kind == source_kind && kind != VX_F32) {
      copy_words((const uint16_t*)row, (uint16_t*)out, kind, cols, place.lane);
      continue;
    }
    for (int32_t k = 0; k < cols; k += 16) {
      const int32_t n = cols - k < 16 ? cols - k : 16;
      write_lane(out, kind, k, n, place.lane, read_source(row, source_kind, k, n));
    }
  }
}
