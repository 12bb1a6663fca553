// VX: per instruction set
// A matrix for each group of features. Tokens go through in parts: a group's features of all of them are
// brought together, multiplied, and its results put back in their places.
#include "products.h"
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxGroupedLinear {
  VxWeight w;         // of group 0; those of the others lie behind
  const float* x;     // (T, G * C)
  float* y;           // (T, G * R)
  void* panels;       // room for the packed activations of GROUPED_TOKENS tokens of all groups
  float* workspace;   // (G, GROUPED_TOKENS, C), then (G, GROUPED_TOKENS, R)
  int32_t groups;     // G
};

namespace {

enum { GROUPED_TOKENS = 64, MAX_GROUPS = 128 };

}  // namespace

void grouped_linear(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxGroupedLinear& a = *(const VxGroupedLinear*)args;
  const int32_t groups = a.groups, cols = a.w.features, rows = a.w.rows;
  for (int32_t first = 0; first < step->T; first += GROUPED_TOKENS) {
    const int32_t left = step->T - first, tokens = left < GROUPED_TOKENS ? left : (int32_t)GROUPED_TOKENS;
    float *in = a.workspace, *out = in + (size_t)groups * GROUPED_TOKENS * cols;
    for (int32_t i; (i = vx_next(ctx)) < tokens;)
      for (int32_t g = 0; g < groups; ++g)
        __builtin_memcpy(in + ((size_t)g * tokens + i) * cols, a.x + ((size_t)(first + i) * groups + g) * cols,
                         cols * sizeof(float));
    vx_barrier(ctx);
    Part parts[MAX_GROUPS];
    for (int32_t g = 0; g < groups; ++g) parts[g] = {g, g * tokens, tokens, 0, false};
    const Product product = {a.w, {VX_NONE, 0.0f, 0.0f, 1.0f}, in, nullptr, groups * tokens, out, rows};
    run_products({product, a.panels, parts, groups}, ctx);
    vx_barrier(ctx);
    for (int32_t i; (i = vx_next(ctx)) < tokens;)
      for (int32_t g = 0; g < groups; ++g)
        __builtin_memcpy(a.y + ((size_t)(first + i) * groups + g) * rows, out + ((size_t)g * tokens + i) * rows,
                         rows * sizeof(float));
    if (first + tokens < step->T) vx_barrier(ctx);
  }
}
VX_OP(grouped_linear, VxGroupedLinear)

}  // namespace VX_ISA
}  // namespace vx
