// The tokens of a step through the states of one recurrent layer, each row's in their order: the
// body of a kernel function whose signature mx.fast.metal_kernel writes. Never run on Metal so far:
// tests/kernels runs it through a shim on the CPU.
//
// Memory, all float: q, k (T, H, DK) as the rule has normed and scaled them; v (T, H, DV); decay
// (T, H, DK) where CHANNEL, else (T, H); strength (T, H); states (slots, H, DK, DV). source (R): the
// slot that a row reads, -1 for zeros; first_token, num_tokens (R). left_at (T): the place in `left`
// of the states behind a token, -1 for none.
// Out: out (T, H, DV); left (R + M, H, DK, DV), the states behind each row's last token and behind M
// others.
//
// Grid: (DV / (SIMDS * COLS), H, R) threadgroups of SIMDS simdgroups. A simdgroup keeps COLS columns
// of a head's state in registers from the first token to the last, a lane every 32nd row of them: a
// state is read and written once, and a token's sums over rows are one sum of the simdgroup each,
// in the same order whatever the step holds beside it.

constexpr uint LANE_ROWS = (DK + 31) / 32;
const uint lane = thread_index_in_simdgroup;
const uint head = threadgroup_position_in_grid.y;
const uint row = threadgroup_position_in_grid.z;
const uint first_col =
    (threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup) * COLS;

const int slot = source[row];
float state[LANE_ROWS][COLS];
for (uint i = 0; i < LANE_ROWS; i++) {
  const uint d = lane + 32 * i;
  for (uint c = 0; c < COLS; c++) {
    const bool held = slot >= 0 && d < DK && first_col + c < DV;
    state[i][c] = held ? states[((ulong(slot) * H + head) * DK + d) * DV + first_col + c] : 0;
  }
}

const uint begin = first_token[row];
const uint end = begin + num_tokens[row];
for (uint token = begin; token < end; token++) {
  const ulong at = ulong(token) * H + head;
  float key[LANE_ROWS];
  float query[LANE_ROWS];
  for (uint i = 0; i < LANE_ROWS; i++) {
    const uint d = lane + 32 * i;
    key[i] = d < DK ? k[at * DK + d] : 0;
    query[i] = d < DK ? q[at * DK + d] : 0;
    const float kept = d < DK ? decay[CHANNEL ? at * DK + d : at] : 0;
    for (uint c = 0; c < COLS; c++) {
      state[i][c] *= kept;
    }
  }
  for (uint c = 0; c < COLS; c++) {
    float value = first_col + c < DV ? v[at * DV + first_col + c] : 0;
    if (DELTA) {
      float known = 0;
      for (uint i = 0; i < LANE_ROWS; i++) {
        known += key[i] * state[i][c];
      }
      value -= metal::simd_sum(known);
    }
    value *= strength[at];
    float answer = 0;
    for (uint i = 0; i < LANE_ROWS; i++) {
      state[i][c] += key[i] * value;
      answer += query[i] * state[i][c];
    }
    answer = metal::simd_sum(answer);
    if (lane == 0 && first_col + c < DV) {
      out[at * DV + first_col + c] = answer;
    }
  }
  const int place = left_at[token];
  for (uint i = 0; place >= 0 && i < LANE_ROWS; i++) {
    const uint d = lane + 32 * i;
    for (uint c = 0; c < COLS; c++) {
      if (d < DK && first_col + c < DV) {
        left[((ulong(place) * H + head) * DK + d) * DV + first_col + c] = state[i][c];
      }
    }
  }
}
