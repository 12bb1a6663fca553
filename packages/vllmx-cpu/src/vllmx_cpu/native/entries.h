// Compressed entries in pages: a page of P tokens has ceil(P / ratio) rows, bf16, f16 or f32, one after the
// other. The entry of a window lies in the page of its last token, at that token's offset / ratio.
#pragma once
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct EntryPages {
  uint8_t* base;
  int32_t kv_dtype;    // VxDType
  int32_t block_size;  // P
  int32_t ratio, size;

  uint8_t* row(int32_t block, int32_t offset) const {
    const size_t rows = (block_size + ratio - 1) / ratio;
    return base + (block * rows + offset / ratio) * size * (kv_dtype == VX_F32 ? 4 : 2);
  }
  // Entry `number` of a row with this block table.
  const uint8_t* entry(const int32_t* table, int32_t number) const {
    const int32_t last = (number + 1) * ratio - 1;
    return row(table[last / block_size], last % block_size);
  }
  void read(const uint8_t* from, float* to) const {
    for_lanes(size, [&](int32_t i, int n) {
      if (kv_dtype == VX_F32) return store_some(to + i, load_some((const float*)from + i, n), n);
      uint16_t words[16] = {};
      __builtin_memcpy(words, from + 2 * i, 2 * n);
      store_some(to + i, kv_dtype == VX_BF16 ? load_bf16(words) : load_f16(words), n);
    });
  }
  void write(const float* from, uint8_t* to) const {
    for_lanes(size, [&](int32_t i, int n) {
      const F32x16 v = load_some(from + i, n);
      if (kv_dtype == VX_F32) return store_some((float*)to + i, v, n);
      uint16_t words[16];
      kv_dtype == VX_BF16 ? store_bf16(words, v) : store_f16(words, v);
      __builtin_memcpy(to + 2 * i, words, 2 * n);
    });
  }
};

}  // namespace VX_ISA
}  // namespace vx
