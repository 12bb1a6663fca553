// VX: per instruction set
// y = x * act(g), a gate for each `span` neighbouring features.
#include "activation.h"
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxGate {
  const float* x;  // (T, width)
  const float* g;  // (T, width / span)
  float* y;        // (T, width)
  int32_t width, span;
  int32_t kind;    // VxActivation or VxOpening
};

namespace {

// Beside VxActivation.
enum VxOpening : int32_t { VX_SIGMOID = 4, VX_IDENTITY = 5, VX_TANH = 6 };

VX_INLINE F32x16 opening(F32x16 g, int32_t kind) {
  switch (kind) {
    case VX_SIGMOID:
      return splat(1.0f) / (splat(1.0f) + exp(-g));
    case VX_IDENTITY:
      return g;
    case VX_TANH:
      return tanh(g);
    default:
      return activate(g, kind);
  }
}

// Sixteen gates at a time, each for its own features of x.
VX_INLINE void spread_gates(const VxGate* a, const float* x, const float* g, float* y) {
  for_lanes(a->width / a->span, [=](int32_t first, int gates) {
    float opened[16];
    store(opened, opening(load_some(g + first, gates), a->kind));
    for (int k = 0; k < gates; ++k) {
      const size_t begin = (size_t)(first + k) * a->span;
      const F32x16 factor = splat(opened[k]);
      for_lanes(a->span, [=](int32_t i, int n) {
        store_some(y + begin + i, load_some(x + begin + i, n) * factor, n);
      });
    }
  });
}

}  // namespace

void gate(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxGate* a = (const VxGate*)args;
  for_rows(step, ctx, [=](int32_t row) {
    const float* x = a->x + (size_t)row * a->width;
    const float* g = a->g + (size_t)row * (a->width / a->span);
    float* y = a->y + (size_t)row * a->width;
    if (a->span > 1) return spread_gates(a, x, g, y);
    for_lanes(a->width, [=](int32_t i, int n) {
      store_some(y + i, load_some(x + i, n) * opening(load_some(g + i, n), a->kind), n);
    });
  });
}
VX_OP(gate, VxGate)

}  // namespace VX_ISA
}  // namespace vx
