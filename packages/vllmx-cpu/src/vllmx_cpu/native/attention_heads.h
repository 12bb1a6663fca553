// One head of one token on its way into attention: RMS norm over D, then RoPE, in float32.
#pragma once
#include "attention_pages.h"

#include <utility>

namespace vx {
namespace VX_ISA {

constexpr int kMaxHeadSize = 1024;

// x / sqrt(mean(x^2) + eps) * weight.
VX_INLINE void norm_head(const float* x, const float* weight, float eps, int head_size, float* out) {
  F32x16 squares = zero();
  for (int i = 0; i < head_size; i += 16) {
    F32x16 v = load_n(x + i, head_size - i < 16 ? head_size - i : 16);
    squares = fma(v, v, squares);
  }
  F32x16 factor = splat(1.0f / __builtin_sqrtf(reduce_add(squares) / (float)head_size + eps));
  for (int i = 0; i < head_size; i += 16) {
    int n = head_size - i < 16 ? head_size - i : 16;
    store_n(out + i, load_n(x + i, n) * factor * load_n(weight + i, n), n);
  }
}

// Rotates pairs (i, i + rotary_dim / 2) in place; `table` holds rotary_dim / 2 cosines, then sines.
VX_INLINE void rotate_halves(float* x, const float* table, int rotary_dim) {
  int half = rotary_dim / 2;
  for (int i = 0; i < half; i += 16) {
    int n = half - i < 16 ? half - i : 16;
    F32x16 a = load_n(x + i, n), b = load_n(x + half + i, n);
    F32x16 cosine = load_n(table + i, n), sine = load_n(table + half + i, n);
    store_n(x + i, a * cosine - b * sine, n);
    store_n(x + half + i, b * cosine + a * sine, n);
  }
}

// Rotates pairs (2i, 2i + 1) in place.
VX_INLINE void rotate_pairs(float* x, const float* table, int rotary_dim) {
  int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    float a = x[2 * i], b = x[2 * i + 1], cosine = table[i], sine = table[half + i];
    x[2 * i] = a * cosine - b * sine;
    x[2 * i + 1] = b * cosine + a * sine;
  }
}

// Sums and differences of the lanes that are n apart.
template <int n, int... lanes>
VX_INLINE NativeF turn_pairs(NativeF v, std::integer_sequence<int, lanes...>) {
  const NativeU flips = {(lanes & n ? 0x80000000u : 0u)...};
  return VX_LANES(NativeI, v, v, (lanes ^ n)...) + as_f32(as_u32(v) ^ flips);
}
template <int n = 1>
VX_INLINE NativeF turn_lanes(NativeF v) {
  constexpr int lanes = sizeof(NativeF) / sizeof(float);
  if constexpr (n < lanes) return turn_lanes<2 * n>(turn_pairs<n>(v, std::make_integer_sequence<int, lanes>()));
  return v;
}
template <class Half>
VX_INLINE Twice<Half> turn_lanes(Twice<Half> v) {
  const Half low = turn_lanes(v.lo), high = turn_lanes(v.hi);
  return {low + high, low - high};
}

// The rotation of heads that are kept as 4-bit codes, in place: `turned` of vllmx_core/kv_dtypes.py, to the
// bit. head_size is a multiple of 16.
static __attribute__((noinline)) void turn_head(float* x, int head_size) {
  const int run = head_size & -head_size;
  for (int i = 0; i < head_size; i += 16) store(x + i, turn_lanes(load(x + i)));
  for (int n = 16; n < run; n *= 2) {
    for (int i = 0; i < head_size; i += i % (2 * n) == n - 16 ? n + 16 : 16) {
      const F32x16 a = load(x + i), b = load(x + i + n);
      store(x + i, a + b), store(x + i + n, a - b);
    }
  }
  const F32x16 factor = splat((float)(1.0 / __builtin_sqrt((double)run)));
  for (int i = 0; i < head_size; i += 16) store(x + i, load(x + i) * factor);
}

VX_INLINE bool turns_keys(const VxAttention& a) { return a.kv_dtype == VX_KV_Q4; }
VX_INLINE bool turns_values(const VxAttention& a) { return a.kv_dtype == VX_KV_Q4 || a.kv_dtype == VX_KV_INT8_Q4; }

// Floats from a token of qkv to the next.
VX_INLINE size_t token_stride(const VxAttention& a) {
  return (size_t)(a.num_heads + (a.shared ? 0 : 2 * a.num_kv_heads)) * a.head_size;
}

// The row of the table by which a token is rotated.
VX_INLINE int rope_row(const VxAttention& a, const VxStep& step, int token) {
  return a.rope_rows ? a.rope_rows[token] : step.positions[token];
}

// A head that will be wanted soon: heads of successive tokens lie too far apart for the machine to guess.
VX_INLINE void prefetch_head(const float* x, int head_size) {
  for (int i = 0; i < head_size; i += 16) prefetch(x + i);
}

// A q or k head of a token: normed where norm is not null, rotated by row `position` where there is a
// table; the other way round where norm_eps is below 0; turned where keys are. out: Dp floats, the padding 0.
VX_INLINE void prepare_head(const VxAttention& a, const float* x, const float* norm, int position,
                            float* out) {
  int head_size = a.head_size, width = padded(head_size);
  const bool last = norm && a.norm_eps < 0.0f;
  if (norm && !last) {
    norm_head(x, norm, a.norm_eps, head_size, out);
  } else {
    __builtin_memcpy(out, x, (size_t)head_size * sizeof(float));
  }
  for (int i = head_size; i < width; ++i) out[i] = 0.0f;
  if (a.rope && a.rotary_dim > 0) {
    const float* table = a.rope + (size_t)position * a.rotary_dim;
    if (a.interleaved) {
      rotate_pairs(out, table, a.rotary_dim);
    } else {
      rotate_halves(out, table, a.rotary_dim);
    }
  }
  if (last) norm_head(out, norm, -a.norm_eps, head_size, out);
  if (turns_keys(a)) turn_head(out, head_size);
}

}  // namespace VX_ISA
}  // namespace vx
