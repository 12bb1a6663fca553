// What a step or a pass of a tower has in addition to VxStep, where a model sees images or hidden states.
//
// Each submission begins with the op `see`, which puts the pointers of this step where the recorded ops look for
// them: vllmx_core.plan.StepPlan's feature_rows, tap_rows and rope_positions, and PatchRows.
#pragma once
#include "vx.h"

struct VxImages {
  const int32_t* feature_rows;    // (T) row of the store, -1: none; null: all -1
  const int32_t* rope_positions;  // (A, T), or null: the positions on all axes
  const float* patches;           // (T, D)
  const int32_t* table_rows;      // (T, taps)
  const float* table_weights;     // (T, taps)
  const int32_t* keep;            // (L) rows of the store
  const int32_t* visible_to;      // (T) last position that each token sees, or null: its own
  const int32_t* own_rows;        // (T) row of a drafter's own parts of the store, as feature_rows
  const int32_t* tap_rows;        // (T) row of the store that hidden states go to, -1: none; null: all -1
  const int32_t* windows;         // (num_windows + 1) first patch of each, then T; null: the tower has none
  const int32_t* cross_rows;      // (R, 2) first row of the store for cross-attention and their number; null: none
  int32_t taps, num_windows;
};
