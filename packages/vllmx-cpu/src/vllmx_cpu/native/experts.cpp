// VX: per instruction set
// A token through those of its experts that are here: the slots of all tokens sorted by expert, two products
// whose parts are the experts that have any, and each token's slots added up.
//
// Every thread sorts for itself, which is less than waiting for another. A used expert's matrices are read
// once, whatever its number of rows; a row's sums do not depend on it (micro.h), and its slots are added in
// the order of choice.
#include "experts.h"
#include "products.h"
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

namespace {

struct Order {
  int32_t* token;  // (T * k) of each row
  int32_t* row;    // (T * k) of each slot, -1: its expert is not here
  Part* parts;     // the experts that have rows
  int32_t count, rows;
};

VX_INLINE bool is_here(const VxExperts* a, int32_t expert) {
  return expert >= a->first && expert < a->first + a->count;
}

Order sort_slots(const VxExperts* a, int32_t tokens, uint8_t* room) {
  static_assert(sizeof(Part) <= ExpertsRoom::PART_BYTES, "room for the parts");
  const int32_t slots = tokens * a->chosen;
  Order order = {(int32_t*)room, (int32_t*)room + slots, nullptr, 0, 0};
  int32_t* start = order.row + slots;  // of each expert's rows
  order.parts = (Part*)(room + ExpertsRoom::rounded((2 * (int64_t)slots + a->count + 1) * 4));
  for (int32_t e = 0; e <= a->count; ++e) start[e] = 0;
  for (int32_t i = 0; i < slots; ++i)
    if (is_here(a, a->ids[i])) ++start[a->ids[i] - a->first + 1];
  for (int32_t e = 0; e < a->count; ++e) {
    const int32_t rows = start[e + 1];
    start[e + 1] += start[e];
    if (rows > 0) order.parts[order.count++] = {e, start[e], rows, 0, false};
  }
  order.rows = start[a->count];
  for (int32_t i = 0; i < slots; ++i) {
    order.row[i] = -1;
    if (!is_here(a, a->ids[i])) continue;
    const int32_t row = start[a->ids[i] - a->first]++;
    order.row[i] = row, order.token[row] = i / a->chosen;
  }
  return order;
}

enum { SUM_COLUMNS = 512 };

// y = the sum over a token's slots of weight * output.
void add_slots(const VxExperts* a, int32_t tokens, const float* outputs, const int32_t* row, VxCtx* ctx) {
  const int32_t width = a->down.rows, pieces = (width + SUM_COLUMNS - 1) / SUM_COLUMNS;
  for (int32_t i; (i = vx_next(ctx)) < tokens * pieces;) {
    const int32_t token = i / pieces, begin = i % pieces * SUM_COLUMNS;
    const int32_t *rows = row + (size_t)token * a->chosen, left = width - begin;
    const float* weights = a->weights + (size_t)token * a->chosen;
    for_lanes(left < SUM_COLUMNS ? left : SUM_COLUMNS, [=](int32_t k, int n) {
      F32x16 sum = zero();
      for (int32_t slot = 0; slot < a->chosen; ++slot)
        if (rows[slot] >= 0)
          sum = fma(splat(weights[slot]), load_some(outputs + (size_t)rows[slot] * width + begin + k, n), sum);
      store_some(a->y + (size_t)token * width + begin + k, sum, n);
    });
  }
}

}  // namespace

void experts(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxExperts* a = (const VxExperts*)args;
  const int32_t tokens = step->T, features = a->down.features, width = a->down.rows;
  const ExpertsRoom room(tokens, a->chosen, features, width, a->count);
  uint8_t* workspace = (uint8_t*)a->workspace;
  float *inner = (float*)(workspace + room.inner), *outputs = (float*)(workspace + room.outputs);
  const Order order = sort_slots(a, tokens, workspace + room.order + (size_t)ctx->tid * room.order_bytes);
  const Product up = {a->gate_up, {a->activation, 0.0f, a->clamp, a->alpha}, a->x, order.token, order.rows, inner, features};
  run_products({up, a->panels, order.parts, order.count}, ctx);
  vx_barrier(ctx);
  const Product down = {a->down, {VX_NONE, 0.0f, 0.0f, 1.0f}, inner, nullptr, order.rows, outputs, width};
  run_products({down, a->panels, order.parts, order.count}, ctx);
  vx_barrier(ctx);
  add_slots(a, tokens, outputs, order.row, ctx);
}
VX_OP(experts, VxExperts)

}  // namespace VX_ISA
}  // namespace vx
