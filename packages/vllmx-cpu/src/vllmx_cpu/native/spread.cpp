// VX: per instruction set
// The logits of a reduced vocabulary in the places of the whole one; -inf elsewhere.
//
// A piece of work is some ids of one row, so that a single row keeps all threads busy.
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxSpread {
  const float* x;        // (L, D)
  const float* sources;  // (V) the place in x, negative: none
  float* y;              // (L, V)
  int32_t reduced, whole;  // D, V
};

namespace {

enum { IDS_AT_ONCE = 4096 };

}  // namespace

void spread(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxSpread& a = *(const VxSpread*)args;
  const int32_t pieces = (a.whole + IDS_AT_ONCE - 1) / IDS_AT_ONCE;
  for (int32_t work; (work = vx_next(ctx)) < step->L * pieces;) {
    const int32_t row = work / pieces, begin = work % pieces * IDS_AT_ONCE;
    const int32_t end = a.whole - begin < IDS_AT_ONCE ? a.whole : begin + IDS_AT_ONCE;
    const float* x = a.x + (size_t)row * a.reduced;
    float* y = a.y + (size_t)row * a.whole;
    for (int32_t id = begin; id < end; ++id) {
      const float source = a.sources[id];
      y[id] = source < 0.0f ? -__builtin_inff() : x[(int32_t)source];
    }
  }
}
VX_OP(spread, VxSpread)

}  // namespace VX_ISA
}  // namespace vx
