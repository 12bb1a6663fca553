// Attention of decode rows over KV pages, without gathering them: the body of a kernel function
// whose signature mx.fast.metal_kernel writes. Never run on Metal so far: tests/kernels runs it
// through a shim on the CPU.
//
// Memory: q (N, H, D) of T; k_pages, v_pages (slots, K, D), two numbers to a byte where K_NIBBLES,
// V_NIBBLES, with k_scales, v_scales (slots, K) float where SCALED; block_table (N, B); first_key, key_end (N): the positions that a row sees.
// factors: scale, soft-cap.
// Out, for each part of PART positions: sums (N, H, parts, D), tops and masses (N, H, parts) of the
// softmax of that part alone; `paged.py` joins the parts.
//
// Grid: (parts, K * SPLITS, N) threadgroups of SIMDS simdgroups. A threadgroup serves up to HEADS
// query heads of one kv head, so a key is read once for all of them; its simdgroups take every
// SIMDS-th position, a lane every 32nd number of a vector: neighbours read neighbours.

constexpr uint LANE_VALUES = (D + 31) / 32;
const uint part = threadgroup_position_in_grid.x;
const uint kv_head = threadgroup_position_in_grid.y / SPLITS;
const uint split = threadgroup_position_in_grid.y % SPLITS;
const uint row = threadgroup_position_in_grid.z;
const uint parts = threadgroups_per_grid.x;
const uint simd = simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;

const uint first_head = kv_head * GROUP + split * HEADS;
const uint heads = metal::min(uint(HEADS), uint(GROUP - split * HEADS));
const uint begin = first_key[row] + part * PART;
const uint end = metal::min(uint(key_end[row]), begin + PART);

float query[HEADS][LANE_VALUES];
float sum[HEADS][LANE_VALUES];
float top[HEADS];
float mass[HEADS];
for (uint h = 0; h < HEADS; h++) {
  top[h] = -INFINITY;
  mass[h] = 0;
  for (uint i = 0; i < LANE_VALUES; i++) {
    const uint d = lane + 32 * i;
    const bool held = h < heads && d < D;
    query[h][i] = held ? float(q[(ulong(row) * H + first_head + h) * D + d]) * factors[0] : 0;
    sum[h][i] = 0;
  }
}

for (uint position = begin + simd; position < end; position += SIMDS) {
  const uint block = block_table[row * block_table_shape[1] + position / PAGE];
  const ulong vector = (ulong(block) * PAGE + position % PAGE) * K + kv_head;
  float key[LANE_VALUES];
  float value[LANE_VALUES];
  for (uint i = 0; i < LANE_VALUES; i++) {
    const uint d = lane + 32 * i;
    key[i] = d < D ? page_number<K_NIBBLES, D>(k_pages, vector, d) : 0;
    value[i] = d < D ? page_number<V_NIBBLES, D>(v_pages, vector, d) : 0;
    if (SCALED) {
      value[i] *= v_scales[vector];
    }
  }
  const float key_scale = SCALED ? k_scales[vector] : 1;
  for (uint h = 0; h < HEADS; h++) {  // a head too many has a query of zeros: the loop unrolls
    float product = 0;
    for (uint i = 0; i < LANE_VALUES; i++) {
      product += query[h][i] * key[i];
    }
    float score = metal::simd_sum(product) * key_scale;
    if (CAPPED) {
      score = factors[1] * metal::tanh(score / factors[1]);
    }
    const float higher = metal::max(top[h], score);
    const float kept = metal::exp(top[h] - higher);
    const float weight = metal::exp(score - higher);
    top[h] = higher;
    mass[h] = mass[h] * kept + weight;
    for (uint i = 0; i < LANE_VALUES; i++) {
      sum[h][i] = sum[h][i] * kept + weight * value[i];
    }
  }
}

threadgroup float all_tops[SIMDS * HEADS];
threadgroup float all_masses[SIMDS * HEADS];
threadgroup float all_sums[SIMDS * HEADS * D];
for (uint h = 0; h < HEADS; h++) {
  const uint at = simd * HEADS + h;
  if (lane == 0) {
    all_tops[at] = top[h];
    all_masses[at] = mass[h];
  }
  for (uint i = 0; i < LANE_VALUES; i++) {
    const uint d = lane + 32 * i;
    if (d < D) {
      all_sums[at * D + d] = sum[h][i];
    }
  }
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

for (uint index = simd * 32 + lane; index < heads * D; index += SIMDS * 32) {
  const uint h = index / D;
  const uint d = index % D;
  float highest = -INFINITY;
  for (uint s = 0; s < SIMDS; s++) {
    highest = metal::max(highest, all_tops[s * HEADS + h]);
  }
  float whole_mass = 0;
  float whole_sum = 0;
  for (uint s = 0; s < SIMDS; s++) {
    const uint at = s * HEADS + h;
    // a simdgroup without a position has no top: inf - inf would be NaN
    const float share = all_masses[at] == 0 ? 0 : metal::exp(all_tops[at] - highest);
    whole_mass += all_masses[at] * share;
    whole_sum += all_sums[at * D + d] * share;
  }
  const ulong out = (ulong(row) * H + first_head + h) * parts + part;
  sums[out * D + d] = whole_sum;
  if (d == 0) {
    tops[out] = highest;
    masses[out] = whole_mass;
  }
}
