// VX: per instruction set
// Which k of X experts a token goes to, and how much each of them counts.
#include "row_loops.h"
#include "softplus.h"

namespace vx {
namespace VX_ISA {

struct VxRoute {
  const float* logits;  // (T, X)
  const float* bias;    // (X), chooses but does not weigh; or null
  const float* factor;  // (X), multiplies the weight at the end; or null
  int32_t* ids;         // (T, k)
  float* weights;       // (T, k)
  int32_t count, chosen;
  int32_t score;        // 0: softmax, 1: sigmoid, 2: sqrt(softplus), 3: sparsemixer
  int32_t groups, groups_kept;
  int32_t best_two;     // 1: a group counts the sum of its two best, else its best
  int32_t renormalise;
  float eps, scale;
  const float* table;   // (V, k) the experts of each token id, or null: the best ones
  float jitter;         // of sparsemixer
};

namespace {

int32_t in_vectors(int32_t count) { return (count + 15) / 16 * 16; }

// A row's arrays, in whole vectors: what is behind the last expert or group is NaN.
struct Room {
  float *scores, *choice, *groups;
  int32_t lanes;

  Room(const VxRoute* a, VxCtx* ctx)
      : scores((float*)ctx->scratch), choice(scores + in_vectors(a->count)), groups(choice + in_vectors(a->count)),
        lanes(in_vectors(a->count)) {}
};

// The place of the largest of values that may be NaN, the first of equal ones; it becomes NaN.
int32_t take_best(float* values, int32_t lanes) {
  F32x16 best = splat(-__builtin_inff());
  for (int32_t i = 0; i < lanes; i += 16) {
    const F32x16 v = load(values + i);
    best = select(v > best, v, best);
  }
  const float most = reduce_max(best);
  for (int32_t i = 0; i < lanes; i += 16) {
    if (!any(load(values + i) == splat(most))) continue;
    while (values[i] != most) ++i;
    values[i] = __builtin_nanf("");
    return i;
  }
  return 0;
}

void score_row(const VxRoute* a, const float* logits, const Room& room) {
  for (int32_t i = 0; i < room.lanes; ++i) room.scores[i] = i < a->count ? logits[i] : -__builtin_inff();
  if (a->score == 3) return;
  F32x16 most = load(room.scores), sum = zero();
  for (int32_t i = 16; i < room.lanes; i += 16) most = max(most, load(room.scores + i));
  const F32x16 top = splat(reduce_max(most)), one = splat(1.0f);
  for (int32_t i = 0; i < room.lanes; i += 16) {
    const F32x16 v = load(room.scores + i);
    const F32x16 raised = a->score == 0 ? exp(v - top) : a->score == 1 ? one / (one + exp(-v)) : softplus(v);
    sum = sum + raised;
    store(room.scores + i, raised);
  }
  for (int32_t i = 0; a->score == 2 && i < a->count; ++i) room.scores[i] = __builtin_sqrtf(room.scores[i]);
  if (a->score != 0) return;
  const F32x16 total = splat(reduce_add(sum));
  for (int32_t i = 0; i < room.lanes; i += 16) store(room.scores + i, load(room.scores + i) / total);
}

// The weight of the expert that was taken last: its softmax over those near it that are not taken.
float near_weight(const VxRoute* a, float best, const Room& room) {
  const F32x16 most = splat(best), twice = splat(2.0f * a->jitter);
  F32x16 sum = zero();
  for (int32_t i = 0; i < room.lanes; i += 16) {
    const F32x16 v = load(room.scores + i), open = load(room.choice + i);
    const F32x16 size = max(max(v, -v), most), counted = exp(v - most);
    const F32x16 near = select(most - v > twice * size, zero(), counted);
    sum = sum + select(open == open, near, zero());
  }
  return 1.0f / (1.0f + reduce_add(sum));
}

// What experts are chosen by; false: some of it is NaN.
bool choose_by(const VxRoute* a, const Room& room) {
  bool whole = true;
  for (int32_t i = 0; i < room.lanes; ++i) {
    float v = room.scores[i];
    if (a->bias && i < a->count) v += a->bias[i];
    if (i < a->count && v != v) whole = false;
    room.choice[i] = i < a->count ? v : __builtin_nanf("");
  }
  return whole;
}

// Leaves the experts of the best groups.
void keep_groups(const VxRoute* a, const Room& room) {
  const int32_t size = a->count / a->groups, lanes = in_vectors(a->groups);
  for (int32_t g = 0; g < lanes; ++g) {
    float first = -__builtin_inff(), second = first;
    for (int32_t i = g * size; g < a->groups && i < (g + 1) * size; ++i) {
      const float v = room.choice[i];
      second = v > first ? first : v > second ? v : second;
      first = v > first ? v : first;
    }
    room.groups[g] = g >= a->groups ? __builtin_nanf("") : a->best_two ? second + first : first;
  }
  for (int32_t i = 0; i < a->groups_kept; ++i) take_best(room.groups, lanes);  // those are NaN now
  for (int32_t i = 0; i < a->count; ++i)
    if (room.groups[i / size] == room.groups[i / size]) room.choice[i] = __builtin_nanf("");
}

}  // namespace

void route(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxRoute* a = (const VxRoute*)args;
  const Room room(a, ctx);
  for_rows(step, ctx, [=](int32_t row) {
    int32_t* ids = a->ids + (size_t)row * a->chosen;
    float *weights = a->weights + (size_t)row * a->chosen, sum = 0.0f;
    score_row(a, a->logits + (size_t)row * a->count, room);
    if (!choose_by(a, room)) {
      for (int32_t k = 0; k < a->chosen; ++k) ids[k] = k, weights[k] = __builtin_nanf("");
      return;
    }
    if (a->groups > 1) keep_groups(a, room);
    for (int32_t k = 0; k < a->chosen; ++k) {
      ids[k] = a->table ? (int32_t)a->table[(size_t)step->tokens[row] * a->chosen + k] : take_best(room.choice, room.lanes);
      weights[k] = a->score == 3 ? near_weight(a, room.scores[ids[k]], room) : room.scores[ids[k]];
      sum += weights[k];
    }
    for (int32_t k = 0; k < a->chosen; ++k) {
      if (a->renormalise) weights[k] /= sum + a->eps;
      weights[k] *= a->scale;
      if (a->factor) weights[k] *= a->factor[ids[k]];
    }
  });
}
VX_OP(route, VxRoute)

}  // namespace VX_ISA
}  // namespace vx
