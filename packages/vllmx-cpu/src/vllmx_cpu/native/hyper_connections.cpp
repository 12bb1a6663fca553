// VX: per instruction set
// Residual streams: rows of N * E numbers, which a block reads and writes by weights that a matrix has made
// of them (`mixes`). The unit of work is a token.
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxHyper {
  const float* x;      // (T, N * E); of hyper_streams (T, E)
  const float* other;  // (T, E) the block's output, of hyper_write alone
  const float* mixes;  // (T, pitch): N of reading, N of writing, N * N of mixing
  const float* scale;  // 1 or 3
  const float* bias;   // as wide as mixes
  float* y;            // (T, N * E); of hyper_read (T, E)
  int32_t streams, width;  // N, E
  int32_t pitch, iterations;
  float eps, norm_eps;
};

namespace {

enum { MAX_STREAMS = 16 };

// What a norm over all streams multiplies a row by.
float inverse_norm(const VxHyper& a, const float* x) {
  const int32_t size = a.streams * a.width;
  F32x16 squares = zero();
  for_lanes(size, [&](int32_t i, int n) {
    const F32x16 v = load_some(x + i, n);
    squares = fma(v, v, squares);
  });
  return 1.0f / __builtin_sqrtf(reduce_add(squares) / (float)size + a.norm_eps);
}

// Weights first ... first + count - 1, before their function.
void weights_of(const VxHyper& a, const float* mixes, float factor, int32_t first, int32_t count, float* out) {
  for (int32_t i = 0; i < count; ++i) out[i] = mixes[first + i] * factor + a.bias[first + i];
}

void sigmoid(float* x, int32_t count) {
  for_lanes(count, [=](int32_t i, int n) {
    store_some(x + i, splat(1.0f) / (splat(1.0f) + exp(-load_some(x + i, n))), n);
  });
}

// Rows of N numbers become exp(x - greatest of the row) / sum.
void softmax(float* rows, int32_t count) {
  for (int32_t r = 0; r < count; ++r) {
    float *row = rows + r * count, most = row[0], sum = 0.0f;
    for (int32_t i = 1; i < count; ++i) most = row[i] > most ? row[i] : most;
    for_lanes(count, [=](int32_t i, int n) { store_some(row + i, exp(load_some(row + i, n) - splat(most)), n); });
    for (int32_t i = 0; i < count; ++i) sum += row[i];
    for (int32_t i = 0; i < count; ++i) row[i] /= sum;
  }
}

// Divides lines of N numbers, `step` apart, by their sum + eps; from line to line it is `next`.
void divide(float* comb, int32_t count, int32_t step, int32_t next, float eps) {
  for (int32_t line = 0; line < count; ++line) {
    float sum = 0.0f, *first = comb + line * next;
    for (int32_t i = 0; i < count; ++i) sum += first[i * step];
    for (int32_t i = 0; i < count; ++i) first[i * step] /= sum + eps;
  }
}

}  // namespace

void hyper_streams(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxHyper& a = *(const VxHyper*)args;
  for_rows(step, ctx, [&](int32_t token) {
    for (int32_t k = 0; k < a.streams; ++k)
      __builtin_memcpy(a.y + ((size_t)token * a.streams + k) * a.width, a.x + (size_t)token * a.width,
                       a.width * sizeof(float));
  });
}
VX_OP(hyper_streams, VxHyper)

void hyper_read(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxHyper& a = *(const VxHyper*)args;
  for_rows(step, ctx, [&](int32_t token) {
    const float* x = a.x + (size_t)token * a.streams * a.width;
    float weights[MAX_STREAMS], *y = a.y + (size_t)token * a.width;
    weights_of(a, a.mixes + (size_t)token * a.pitch, inverse_norm(a, x) * a.scale[0], 0, a.streams, weights);
    sigmoid(weights, a.streams);
    for_lanes(a.width, [&](int32_t i, int n) {
      F32x16 sum = zero();
      for (int32_t k = 0; k < a.streams; ++k)
        sum = fma(splat(weights[k] + a.eps), load_some(x + (size_t)k * a.width + i, n), sum);
      store_some(y + i, sum, n);
    });
  });
}
VX_OP(hyper_read, VxHyper)

void hyper_write(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxHyper& a = *(const VxHyper*)args;
  const int32_t count = a.streams;
  for_rows(step, ctx, [&](int32_t token) {
    const size_t begin = (size_t)token * count * a.width;
    const float *x = a.x + begin, *other = a.other + (size_t)token * a.width;
    const float* mixes = a.mixes + (size_t)token * a.pitch;
    const float norm = inverse_norm(a, x);
    float write[MAX_STREAMS], comb[MAX_STREAMS * MAX_STREAMS];
    weights_of(a, mixes, norm * a.scale[1], count, count, write);
    sigmoid(write, count);
    weights_of(a, mixes, norm * a.scale[2], 2 * count, count * count, comb);
    softmax(comb, count);
    for (int32_t i = 0; i < count * count; ++i) comb[i] += a.eps;
    divide(comb, count, count, 1, a.eps);
    for (int32_t i = 1; i < a.iterations; ++i) {
      divide(comb, count, 1, count, a.eps);
      divide(comb, count, count, 1, a.eps);
    }
    for_lanes(a.width, [&](int32_t i, int n) {
      const F32x16 said = load_some(other + i, n);
      for (int32_t k = 0; k < count; ++k) {
        F32x16 sum = splat(2.0f * write[k]) * said;
        for (int32_t j = 0; j < count; ++j)
          sum = fma(splat(comb[j * count + k]), load_some(x + (size_t)j * a.width + i, n), sum);
        store_some(a.y + begin + (size_t)k * a.width + i, sum, n);
      }
    });
  });
}
VX_OP(hyper_write, VxHyper)

}  // namespace VX_ISA
}  // namespace vx
