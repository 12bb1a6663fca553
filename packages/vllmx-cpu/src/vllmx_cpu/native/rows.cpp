// VX: per instruction set
// Ops that work on one token's row at a time: table look-up, norms, element-wise functions.
//
// Threads draw groups of rows from the shared counter; a row is computed by one thread in one order.
#include <string.h>

#include "activation.h"
#include "images.h"
#include "row_loops.h"
#include "simd.h"
#include "unpack_blocks.h"

namespace vx {
namespace VX_ISA {

namespace {

// Row `row` of a packed table (product.h tells the layout): every element lies 16 rows further on.
static void unpack_row(const VxWeight* w, int32_t row, float* y) {
  if (w->kind >= VX_Q4_0) return unpack_block_row(w, row, y);
  const int32_t block = row / 16, lane = row % 16;
  if (w->kind == VX_F32) {
    const float* p = (const float*)w->data + (size_t)block * w->cols * 16 + lane;
    for (int32_t k = 0; k < w->cols; ++k) y[k] = p[(size_t)k * 16];
    return;
  }
  if (w->kind == VX_F16) {
    const uint16_t* p = (const uint16_t*)w->data + (size_t)block * w->cols * 16 + lane;
    for_lanes(w->cols, [=](int32_t i, int n) {
      uint16_t words[16] = {0};
      for (int k = 0; k < n; ++k) words[k] = p[(size_t)(i + k) * 16];
      store_some(y + i, load_f16(words), n);
    });
    return;
  }
  const size_t pairs = ((size_t)w->cols + 1) / 2;
  const uint16_t* p = (const uint16_t*)w->data + (size_t)block * pairs * 32 + lane * 2;
  for (int32_t k = 0; k < w->cols; ++k) y[k] = bf16_to_float(p[(size_t)(k / 2) * 32 + (k & 1)]);
}

// x + residual where there is one, kept in `sum` where it is wanted.
VX_INLINE F32x16 summed(const VxNorm* a, size_t at, int n) {
  F32x16 v = load_some(a->x + at, n);
  if (a->residual) v = v + load_some(a->residual + at, n);
  if (a->sum) store_some(a->sum + at, v, n);
  return v;
}

VX_INLINE const float* kept(const VxNorm* a) { return a->sum ? a->sum : a->x; }

template <class Function>
VX_INLINE void elementwise(const VxElementwise* a, const VxStep* step, VxCtx* ctx, Function function) {
  for_rows(step, ctx, [=](int32_t row) {
    const size_t begin = (size_t)row * a->width;
    for_lanes(a->width, [=](int32_t i, int n) {
      store_some(a->y + begin + i, function(row, i, n), n);
    });
  });
}

}  // namespace

constexpr int32_t kTypes = 2, kPart = 3;  // of VxEmbedding::source
constexpr int32_t kTanh = 6;  // beside VxActivation; as gate.cpp numbers it

void embedding(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxEmbedding* a = (const VxEmbedding*)args;
  const int32_t* sources[] = {step->tokens, step->positions, step->token_types, step->tokens};
  const int32_t* ids = sources[a->source];
  for_rows(step, ctx, [=](int32_t row) {
    const int32_t given = (ids ? ids[row] : 0) + a->offset;
    const int32_t id = a->source == kTypes && given >= a->w.rows ? a->w.rows - 1 : given;
    float* y = a->y + (size_t)row * a->w.cols;
    if (id >= 0 && id < a->w.rows)
      unpack_row(&a->w, id, y);
    else
      for (int32_t k = 0; k < a->w.cols; ++k)  // never another's memory
        y[k] = a->source == kPart ? 0 : __builtin_nanf("");
  });
}
VX_OP(embedding, VxEmbedding)

struct VxMix {
  VxWeight w;              // (entries, E); of a constant the columns alone
  const float* constant;   // (entries, E), or null
  const VxImages* images;
  float* y;                // (T, E)
};

// Each patch's weighted sum of a few rows of the table, in their order.
void mix(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxMix& a = *(const VxMix*)args;
  const VxImages& images = *a.images;
  float* line = (float*)ctx->scratch;
  const int32_t width = a.w.cols;
  for_rows(step, ctx, [=, &a, &images](int32_t row) {
    float* y = a.y + (size_t)row * width;
    for_lanes(width, [=](int32_t i, int n) { store_some(y + i, zero(), n); });
    for (int32_t k = 0; k < images.taps; ++k) {
      const size_t at = (size_t)row * images.taps + k;
      const float* entry = a.constant ? a.constant + (size_t)images.table_rows[at] * width : line;
      if (!a.constant) unpack_row(&a.w, images.table_rows[at], line);
      const F32x16 share = splat(images.table_weights[at]);
      for_lanes(width, [=](int32_t i, int n) {
        store_some(y + i, fma(load_some(entry + i, n), share, load_some(y + i, n)), n);
      });
    }
  });
}
VX_OP(mix, VxMix)

void rms_norm(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxNorm* a = (const VxNorm*)args;
  for_rows(step, ctx, [=](int32_t row) {
    const size_t begin = (size_t)row * a->width;
    F32x16 squares = zero();
    for_lanes(a->width, [&](int32_t i, int n) {
      const F32x16 v = summed(a, begin + i, n);
      squares = fma(v, v, squares);
    });
    const F32x16 factor =
        splat(1.0f / __builtin_sqrtf(reduce_add(squares) / (float)a->width + a->eps));
    for_lanes(a->width, [=](int32_t i, int n) {
      const F32x16 v = load_some(kept(a) + begin + i, n);
      store_some(a->y + begin + i, v * factor * load_some(a->weight + i, n), n);
    });
  });
}
VX_OP(rms_norm, VxNorm)

void layer_norm(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxNorm* a = (const VxNorm*)args;
  for_rows(step, ctx, [=](int32_t row) {
    const size_t begin = (size_t)row * a->width;
    F32x16 total = zero();
    for_lanes(a->width, [&](int32_t i, int n) { total = total + summed(a, begin + i, n); });
    const F32x16 mean = splat(reduce_add(total) / (float)a->width);
    F32x16 squares = zero();
    for_lanes(a->width, [&](int32_t i, int n) {
      F32x16 d = load_some(kept(a) + begin + i, n) - mean;
      d = select(first_lanes(n), d, zero());
      squares = fma(d, d, squares);
    });
    const F32x16 factor =
        splat(1.0f / __builtin_sqrtf(reduce_add(squares) / (float)a->width + a->eps));
    for_lanes(a->width, [=](int32_t i, int n) {
      F32x16 v = (load_some(kept(a) + begin + i, n) - mean) * factor * load_some(a->weight + i, n);
      if (a->bias) v = v + load_some(a->bias + i, n);
      store_some(a->y + begin + i, v, n);
    });
  });
}
VX_OP(layer_norm, VxNorm)

void gated_act(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxElementwise* a = (const VxElementwise*)args;
  elementwise(a, step, ctx, [=](int32_t row, int32_t i, int n) {
    const float* gate = a->x + (size_t)row * a->width * 2 + i;
    F32x16 g = load_some(gate, n), up = load_some(gate + a->width, n);
    if (a->factor != 0.0f) {  // the limit of both; NaN stays NaN
      const F32x16 most = splat(a->factor);
      g = select(g > most, most, g), up = select(up > most, most, select(up < -most, -most, up));
    }
    return activate(g, a->activation) * up;
  });
}
VX_OP(gated_act, VxElementwise)

void activation(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxElementwise* a = (const VxElementwise*)args;
  elementwise(a, step, ctx, [=](int32_t row, int32_t i, int n) {
    const F32x16 x = load_some(a->x + (size_t)row * a->width + i, n);
    return a->activation == kTanh ? tanh(x) : activate(x, a->activation);
  });
}
VX_OP(activation, VxElementwise)

void add(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxElementwise* a = (const VxElementwise*)args;
  elementwise(a, step, ctx, [=](int32_t row, int32_t i, int n) {
    const size_t at = (size_t)row * a->width + i;
    return load_some(a->x + at, n) + load_some(a->other + at, n);
  });
}
VX_OP(add, VxElementwise)

void scale(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxElementwise* a = (const VxElementwise*)args;
  elementwise(a, step, ctx, [=](int32_t row, int32_t i, int n) {
    return load_some(a->x + (size_t)row * a->width + i, n) * splat(a->factor);
  });
}
VX_OP(scale, VxElementwise)

struct VxSlice {
  const float* x;          // the first feature that is wanted, of the first row
  float* y;                // (T, width)
  int32_t stride, width;   // from a row of x to the next
};

void slice(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxSlice* a = (const VxSlice*)args;
  for_rows(step, ctx, [=](int32_t row) {
    memcpy(a->y + (size_t)row * a->width, a->x + (size_t)row * a->stride,
           (size_t)a->width * sizeof(float));
  });
}
VX_OP(slice, VxSlice)

struct VxResize {
  const float* x;                       // (T, kept + runs * size)
  float* y;                             // (T, kept + runs * resized)
  int32_t kept, size, resized, runs;
};

void resize(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxResize* a = (const VxResize*)args;
  const size_t copied = (size_t)(a->size < a->resized ? a->size : a->resized);
  const size_t zeros = (size_t)a->resized - copied;
  for_rows(step, ctx, [=](int32_t row) {
    const float* x = a->x + (size_t)row * (a->kept + (size_t)a->runs * a->size);
    float* y = a->y + (size_t)row * (a->kept + (size_t)a->runs * a->resized);
    memcpy(y, x, (size_t)a->kept * sizeof(float));
    x += a->kept, y += a->kept;
    for (int32_t run = 0; run < a->runs; ++run, x += a->size, y += a->resized) {
      memcpy(y, x, copied * sizeof(float));
      memset(y + copied, 0, zeros * sizeof(float));
    }
  });
}
VX_OP(resize, VxResize)

struct VxMagnitude {
  const float *x, *other;  // (T, width); `other` of match_rms
  float* y;
  int32_t width;
  float number;            // the least mean square, or the deviations of the cutoff
};

VX_INLINE float mean_square(const float* x, int32_t width, F32x16 mean) {
  F32x16 squares = zero();
  for_lanes(width, [&](int32_t i, int n) {
    const F32x16 d = select(first_lanes(n), load_some(x + i, n) - mean, zero());
    squares = fma(d, d, squares);
  });
  return reduce_add(squares) / (float)width;
}

void match_rms(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxMagnitude* a = (const VxMagnitude*)args;
  for_rows(step, ctx, [=](int32_t row) {
    const size_t begin = (size_t)row * a->width;
    const float given = mean_square(a->x + begin, a->width, zero());
    const float wanted = mean_square(a->other + begin, a->width, zero());
    const F32x16 factor = splat(__builtin_sqrtf(wanted / (given < a->number ? a->number : given)));
    for_lanes(a->width, [=](int32_t i, int n) {
      store_some(a->y + begin + i, load_some(a->x + begin + i, n) * factor, n);
    });
  });
}
VX_OP(match_rms, VxMagnitude)

void sparsify(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxMagnitude* a = (const VxMagnitude*)args;
  for_rows(step, ctx, [=](int32_t row) {
    const float* x = a->x + (size_t)row * a->width;
    float* y = a->y + (size_t)row * a->width;
    F32x16 total = zero();
    for_lanes(a->width, [&](int32_t i, int n) { total = total + load_some(x + i, n); });
    const F32x16 mean = splat(reduce_add(total) / (float)a->width);
    const F32x16 above = splat(a->number * __builtin_sqrtf(mean_square(x, a->width, mean)));
    for_lanes(a->width, [=](int32_t i, int n) {
      const F32x16 v = load_some(x + i, n) - mean - above;
      store_some(y + i, select(v < zero(), zero(), v), n);
    });
  });
}
VX_OP(sparsify, VxMagnitude)

}  // namespace VX_ISA
}  // namespace vx
