// How the attention kernels see the pages of each KV dtype: cells, operands and one multiply-add.
//
// A *cell* is what one lane of a vector holds: two bf16 values, one float or one half. A K group is
// `k_steps(D)` vectors of 16 cells (lanes = positions), a V group `v_steps` rows of Dp cells (lanes =
// features). The other operand (q, the probabilities) is broadcast from words of the same width.
// Pages of codes (attention_codes.h) are `scaled`; their `Arithmetic` is that of bf16 pages.
#pragma once
#include "simd.h"

namespace vx {
namespace VX_ISA {

constexpr int kGroup = 16;       // positions in a group
constexpr int kChunk = 64;       // positions between two updates of the running maximum
constexpr int kPartition = 256;  // positions with a softmax of their own

// Lanes of two vectors, those of the second counted on. Clang has the one name, GCC before 12 the other.
#if defined(__clang__)
#define VX_LANES(Vector, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define VX_LANES(Vector, a, b, ...) __builtin_shuffle(a, b, Vector{__VA_ARGS__})
#endif

VX_INLINE int padded(int head_size) { return (head_size + 15) & ~15; }

// Into the second-level cache, which can wait for more lines at a time than the first: decoding from
// memory reads 19.7 instead of 13.7 GB/s with one Zen 4 core.
VX_INLINE void prefetch_pages(const void* p) { __builtin_prefetch(p, 0, 2); }

struct Bf16Pages {
  typedef uint32_t Cell;
  typedef Bf16Pages Arithmetic;
  typedef uint32_t Operand;
  typedef U32x16 Vector;
  static constexpr bool scaled = false;
  static constexpr int per_cell = 2, keys_per_cell = 2, values_per_cell = 2;
  static constexpr int scale_cells = 0;
  VX_INLINE U32x16 load(const Cell* p) { return load_u32(p); }
  VX_INLINE U32x16 broadcast(const Operand* p) { return splat_u32(*p); }
  VX_INLINE F32x16 dot(F32x16 acc, U32x16 a, U32x16 b) { return dot_bf16(acc, a, b); }
  // Values i ... i + 15 of an operand row.
  VX_INLINE void store_operand(Operand* row, int i, F32x16 v) {
#if defined(__AVX512BF16__)
    // Flushes denormals, as the dot product that reads them does.
    __m256bh words = _mm512_cvtneps_pbh((__m512)v);
    __builtin_memcpy((uint16_t*)row + i, &words, sizeof words);
#else
    store_bf16((uint16_t*)row + i, v);
#endif
  }
};

struct F32Pages {
  typedef float Cell;
  typedef F32Pages Arithmetic;
  typedef float Operand;
  typedef F32x16 Vector;
  static constexpr bool scaled = false;
  static constexpr int per_cell = 1, keys_per_cell = 1, values_per_cell = 1;
  static constexpr int scale_cells = 0;
  VX_INLINE F32x16 load(const Cell* p) { return VX_ISA::load(p); }
  VX_INLINE F32x16 broadcast(const Operand* p) { return splat(*p); }
  VX_INLINE F32x16 dot(F32x16 acc, F32x16 a, F32x16 b) { return fma(a, b, acc); }
  VX_INLINE void store_operand(Operand* row, int i, F32x16 v) { store(row + i, v); }
};

struct F16Pages {
  typedef uint16_t Cell;
  typedef F16Pages Arithmetic;
  typedef float Operand;
  typedef F32x16 Vector;
  static constexpr bool scaled = false;
  static constexpr int per_cell = 1, keys_per_cell = 1, values_per_cell = 1;
  static constexpr int scale_cells = 0;
  VX_INLINE F32x16 load(const Cell* p) { return load_f16(p); }
  VX_INLINE F32x16 broadcast(const Operand* p) { return splat(*p); }
  VX_INLINE F32x16 dot(F32x16 acc, F32x16 a, F32x16 b) { return fma(a, b, acc); }
  VX_INLINE void store_operand(Operand* row, int i, F32x16 v) { store(row + i, v); }
};

// Where the groups of one layer lie.
template <class Pages>
struct PageMap {
  typedef typename Pages::Cell Cell;
  Cell* k_base;
  Cell* v_base;
  size_t k_cells, v_cells;  // of a group, without its scales
  int groups_per_block, num_kv_heads;

  explicit PageMap(const VxAttention& a)
      : k_base((Cell*)a.k_pages),
        v_base((Cell*)a.v_pages),
        k_cells((size_t)kGroup * a.head_size / Pages::keys_per_cell),
        v_cells((size_t)kGroup * padded(a.head_size) / Pages::values_per_cell),
        groups_per_block(a.block_size / kGroup),
        num_kv_heads(a.num_kv_heads) {}

  size_t group_number(int block, int kv_head, int group_in_block) const {
    return ((size_t)block * num_kv_heads + kv_head) * groups_per_block + group_in_block;
  }
  Cell* k_group(int block, int kv_head, int group_in_block) const {
    return k_base + group_number(block, kv_head, group_in_block) * (k_cells + Pages::scale_cells);
  }
  Cell* v_group(int block, int kv_head, int group_in_block) const {
    return v_base + group_number(block, kv_head, group_in_block) * (v_cells + Pages::scale_cells);
  }
};

}  // namespace VX_ISA
}  // namespace vx
