// What recurrent layers keep of a sequence: slots of a pool, each with the states of all layers, one
// behind the other.
#pragma once
#include "vx.h"

// The states of one layer.
struct VxStates {
  uint8_t* base;       // where they begin in slot 0
  size_t slot_bytes;   // from one slot to the next

  float* slot(int32_t index) const { return (float*)(base + (size_t)index * slot_bytes); }
  // Where a row finds its state; null for zeros.
  const float* source(const VxStep* step, int32_t row) const {
    return step->state_from[row] < 0 ? nullptr : slot(step->state_from[row]);
  }
  // Where it leaves it, which is the same place in the usual case.
  float* target(const VxStep* step, int32_t row) const { return slot(step->state_to[row]); }
  // Where the state after a token is kept as well; null for nowhere.
  float* after(const VxStep* step, int32_t token) const {
    return !step->state_after || step->state_after[token] < 0 ? nullptr : slot(step->state_after[token]);
  }
};

namespace vx {

// Makes `to` hold what `from` holds, or zeros.
inline void bring_state(const float* from, float* to, size_t floats) {
  if (from == to) return;
  if (from)
    __builtin_memcpy(to, from, floats * sizeof(float));
  else
    __builtin_memset(to, 0, floats * sizeof(float));
}

}  // namespace vx
