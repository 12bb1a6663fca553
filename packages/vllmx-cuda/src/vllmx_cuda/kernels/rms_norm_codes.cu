// rms_norm and add_rms_norm whose result is codes of 8 bits with one scale for each row
// (quantize_rows), where nothing but a product of codes reads it: the normalised row is never
// written, and what is coded is not rounded to elem before.
//
// Layout: x, residual (rows, width) of elem; weight (width) of f32; codes (rows, width); scales
//         (rows) of f32, with VX_GROUPS 1 (ceil(width / 128), pitch), one for each 128 columns. The norm's factor is positive, so the greatest magnitude is known after
//         the first pass, which adds up the squares. `fixed`, where it is not 0: the scale of all
//         rows (FP8).
// Grid:   (rows), whole warps that share one row.
// Floor:  bytes: x (and residual) once in, codes (and residual) once out.
#include "codes8.h"
#include "vx.h"

// What a thread has seen of its row: its sum of squares, its greatest |v * weight|
struct Seen {
  float squares;
  u32 top;
};

VX_DEV void see(Seen& seen, const float (&v)[VX_VEC], const float* weight) {
  float w[VX_VEC];
  load(w, weight);
#pragma unroll
  for (int j = 0; j < VX_VEC; j++) {
    seen.squares += v[j] * v[j];
    seen.top = max(seen.top, magnitude(v[j] * w[j]));
  }
}

VX_DEV void write_codes(const elem* row, const float* weight, u8* codes, float* scales, int width,
                        float eps, float fixed, int pitch, Seen seen, float* sums, u32* tops) {
  float factor = rsqrtf(block_sum(seen.squares, sums) / width + eps);
  code* out = reinterpret_cast<code*>(codes) + (size_t)blockIdx.x * width;
#if VX_GROUPS
  for (int i = threadIdx.x * VX_VEC; i - (int)threadIdx.x * VX_VEC < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC] = {}, w[VX_VEC] = {};
    if (i < width) load(v, row + i), load(w, weight + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) v[j] = v[j] * w[j] * factor;
    store_groups(out, scales + blockIdx.x, v, i, width, pitch);
  }
#else
  float top = __uint_as_float(block_max(seen.top, tops)) * factor;
  CodeScale scale = fixed == 0.f ? code_scale(magnitude(top), CODE_LIMIT) : fixed_scale(fixed);
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC], w[VX_VEC];
    load(v, row + i);
    load(w, weight + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) v[j] = v[j] * w[j] * factor;
    store_codes(out + i, v, scale);
  }
  if (threadIdx.x == 0) scales[blockIdx.x] = scale.scale;
#endif
}

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_codes(const elem* __restrict__ x, const float* __restrict__ weight,
               u8* __restrict__ codes, float* __restrict__ scales, int width, float eps,
               float fixed, int pitch) {
  __shared__ float sums[32];
  __shared__ u32 tops[32];
  const elem* row = x + (size_t)blockIdx.x * width;
  Seen seen = {};
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float v[VX_VEC];
    load(v, row + i);
    see(seen, v, weight + i);
  }
  write_codes(row, weight, codes, scales, width, eps, fixed, pitch, seen, sums, tops);
}
VX_EXPORT(rms_norm_codes)

extern "C" __global__ void __launch_bounds__(1024)
add_rms_norm_codes(const elem* __restrict__ x, elem* residual, const float* __restrict__ weight,
                   u8* __restrict__ codes, float* __restrict__ scales, int width, float eps,
                   float fixed, int pitch) {
  __shared__ float sums[32];
  __shared__ u32 tops[32];
  const elem* row = x + (size_t)blockIdx.x * width;
  elem* sum = residual + (size_t)blockIdx.x * width;
  Seen seen = {};
  for (int i = threadIdx.x * VX_VEC; i < width; i += blockDim.x * VX_VEC) {
    float a[VX_VEC], b[VX_VEC];
    load(a, row + i);
    load(b, sum + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) a[j] = to_float(from_float<elem>(a[j] + b[j]));
    store(sum + i, a);
    see(seen, a, weight + i);
  }
  // each thread reads back only what it wrote itself
  write_codes(sum, weight, codes, scales, width, eps, fixed, pitch, seen, sums, tops);
}
VX_EXPORT(add_rms_norm_codes)
