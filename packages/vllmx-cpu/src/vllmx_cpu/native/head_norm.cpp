// VX: per instruction set
// Heads of q, k and v normed side by side: each head alone, or all heads of q (of k) as one run.
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxHeadNorm {
  const float* x;       // (T, (H + 2K) * D)
  const float* q_norm;  // (H * D) or null: q stays as it is
  const float* k_norm;  // (K * D) or null
  float* y;             // as x
  int32_t heads, kv_heads, head_size;
  int32_t across;   // 1: one norm over all heads of q and one over those of k
  int32_t centred;  // 1: layer norm, 0: RMS norm
  int32_t values;   // 1: RMS norm of each head of v, without a weight
  float eps;
};

namespace {

VX_INLINE float mean_of(const float* x, int32_t width) {
  F32x16 total = zero();
  for_lanes(width, [&](int32_t i, int n) { total = total + load_some(x + i, n); });
  return reduce_add(total) / (float)width;
}

// One run; without a weight the normed values themselves.
VX_INLINE void norm_run(const float* x, const float* weight, int32_t width, bool centred, float eps, float* y) {
  const F32x16 mean = splat(centred ? mean_of(x, width) : 0.0f);
  F32x16 squares = zero();
  for_lanes(width, [&](int32_t i, int n) {
    const F32x16 d = select(first_lanes(n), load_some(x + i, n) - mean, zero());
    squares = fma(d, d, squares);
  });
  const F32x16 factor = splat(1.0f / __builtin_sqrtf(reduce_add(squares) / (float)width + eps));
  for_lanes(width, [=](int32_t i, int n) {
    const F32x16 v = (load_some(x + i, n) - mean) * factor;
    store_some(y + i, weight ? v * load_some(weight + i, n) : v, n);
  });
}

}  // namespace

void head_norm(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxHeadNorm& a = *(const VxHeadNorm*)args;
  const int32_t q = a.heads * a.head_size, kv = a.kv_heads * a.head_size;
  for_rows(step, ctx, [&](int32_t row) {
    const float* x = a.x + (size_t)row * (q + 2 * kv);
    float* y = a.y + (size_t)row * (q + 2 * kv);
    auto part = [&](const float* weight, int32_t width) {
      const int32_t run = a.across ? width : a.head_size;
      if (!weight) __builtin_memcpy(y, x, (size_t)width * sizeof(float));
      for (int32_t i = 0; weight && i < width; i += run)
        norm_run(x + i, weight + i, run, a.centred, a.eps, y + i);
      x += width, y += width;
    };
    part(a.q_norm, q);
    part(a.k_norm, kv);
    if (!a.values) __builtin_memcpy(y, x, (size_t)kv * sizeof(float));
    for (int32_t i = 0; a.values && i < kv; i += a.head_size)
      norm_run(x + i, nullptr, a.head_size, false, a.eps, y + i);
  });
}
VX_OP(head_norm, VxHeadNorm)

}  // namespace VX_ISA
}  // namespace vx
