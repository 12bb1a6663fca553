// VX: per instruction set
// One row for each text, out of the rows of its tokens: the last, the first, or the mean or maximum of all.
//
// A piece of work is some columns of one text, so that one long text keeps all threads busy too; a
// column is computed by one thread in the order of the tokens.
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxPool {
  const float* x;  // (T, E)
  float* y;        // (L, E)
  int32_t width;
  int32_t kind;    // 0 last, 1 mean, 2 first, 3 maximum
};

namespace {

enum { COLUMNS_AT_ONCE = 256 };

// The first token of the row that holds `token`.
VX_INLINE int32_t first_of_row(const VxStep* step, int32_t token) {
  int32_t low = 0, high = step->R;  // query_start[low] <= token < query_start[high]
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (step->query_start[middle] <= token) low = middle;
    else high = middle;
  }
  return step->query_start[low];
}

}  // namespace

void pool(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxPool& a = *(const VxPool*)args;
  const int32_t pieces = (a.width + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE;
  for (int32_t work; (work = vx_next(ctx)) < step->L * pieces;) {
    const int32_t text = work / pieces, begin = work % pieces * COLUMNS_AT_ONCE;
    const int32_t width = a.width - begin < COLUMNS_AT_ONCE ? a.width - begin : COLUMNS_AT_ONCE;
    const int32_t token = step->logit_rows[text];
    const int32_t first = a.kind == 0 ? token : first_of_row(step, token);
    const int32_t last = a.kind == 2 ? first : token;
    const F32x16 share = splat(1.0f / (float)(last - first + 1));
    for_lanes(width, [&](int32_t i, int n) {
      F32x16 total = load_some(a.x + (size_t)first * a.width + begin + i, n);
      for (int32_t t = first + 1; t <= last; ++t) {
        const F32x16 next = load_some(a.x + (size_t)t * a.width + begin + i, n);
        total = a.kind == 3 ? max(total, next) : total + next;
      }
      store_some(a.y + (size_t)text * a.width + begin + i, a.kind == 3 ? total : total * share, n);
    });
  }
}
VX_OP(pool, VxPool)

}  // namespace VX_ISA
}  // namespace vx
