// Attention of prompt chunks over KV pages, without gathering them: the body of a kernel function
// whose signature mx.fast.metal_kernel writes. Never run on Metal so far: tests/kernels runs it
// through a shim on the CPU.
//
// Memory: q (T, H, D) of T; k_pages, v_pages (slots, K, D), two numbers to a byte where K_NIBBLES,
// V_NIBBLES, with k_scales, v_scales (slots, K) float where SCALED; block_table (N, B); items (I, 5) as `PrefillTiles.items` has them; sinks (H)
// float where SINKS. factors: scale, soft-cap. Out: (T, H, D) float.
//
// Grid: (I, K) threadgroups of SIMDS simdgroups. A threadgroup serves 8 * SIMDS query vectors: all
// query heads of one kv head at one token, then at the next one. For each 32 positions all threads
// bring the keys, then the values, into shared memory as floats; a simdgroup multiplies its 8
// vectors with them by 8 x 8 matrices and keeps its sums in such matrices, which a diagonal matrix
// rescales when a row's greatest score rises.

constexpr uint KEYS = 32;
constexpr uint ROWS = 8 * SIMDS;
constexpr uint PIECES = D / 8;
constexpr float LOWEST = -1e30f;  // below every score, and finite
static_assert(ROWS <= KEYS, "queries and sums borrow the place of the keys");

threadgroup float tile[KEYS * D];
threadgroup float scores[ROWS * KEYS];
threadgroup float diagonals[SIMDS * 64];
threadgroup float shares[ROWS];

const uint item = threadgroup_position_in_grid.x;
const uint kv_head = threadgroup_position_in_grid.y;
const uint simd = simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint worker = simd * 32 + lane;

const uint table = items[item * 5] * block_table_shape[1];
const uint first_token = items[item * 5 + 1];
const uint first_position = items[item * 5 + 2];
const uint vectors = items[item * 5 + 3];
const uint first_vector = items[item * 5 + 4];
const uint last_vector = metal::min(first_vector + ROWS, vectors) - 1;
const uint end = first_position + last_vector / GROUP + 1;
const uint begin = first_seen<REACH>(first_position + first_vector / GROUP);

for (uint index = worker; index < ROWS * D; index += SIMDS * 32) {
  const uint vector = first_vector + index / D;
  const uint head = kv_head * GROUP + vector % GROUP;
  const ulong token = first_token + vector / GROUP;
  tile[index] = vector < vectors ? float(q[(token * H + head) * D + index % D]) * factors[0] : 0;
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
metal::simdgroup_matrix<float, 8, 8> queries[PIECES];
metal::simdgroup_matrix<float, 8, 8> sums[PIECES];
for (uint i = 0; i < PIECES; i++) {
  metal::simdgroup_load(queries[i], tile + simd * 8 * D + 8 * i, D);
  sums[i] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
float tops[8];
float masses[8];
for (uint r = 0; r < 8; r++) {
  tops[r] = LOWEST;
  masses[r] = 0;
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

for (uint start = begin; start < end; start += KEYS) {
  for (uint index = worker; index < KEYS * D; index += SIMDS * 32) {
    const uint position = start + index / D;
    float value = 0;
    if (position < end) {
      const uint block = block_table[table + position / PAGE];
      const ulong vector = (ulong(block) * PAGE + position % PAGE) * K + kv_head;
      value = page_number<K_NIBBLES, D>(k_pages, vector, index % D) * (SCALED ? k_scales[vector] : 1);
    }
    tile[index] = value;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  for (uint j = 0; j < KEYS / 8; j++) {
    metal::simdgroup_matrix<float, 8, 8> product =
        metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint i = 0; i < PIECES; i++) {
      metal::simdgroup_matrix<float, 8, 8> keys;  // turned: (D, keys)
      metal::simdgroup_load(keys, tile + 8 * j * D + 8 * i, D, ulong2(0, 0), true);
      metal::simdgroup_multiply_accumulate(product, queries[i], keys, product);
    }
    metal::simdgroup_store(product, scores + simd * 8 * KEYS + 8 * j, KEYS);
  }
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);

  for (uint r = 0; r < 8; r++) {
    const uint vector = first_vector + simd * 8 + r;
    const uint position = first_position + vector / GROUP;
    const uint key = start + lane;
    const bool seen =
        vector < vectors && key <= position && key >= first_seen<REACH>(position);
    const uint at = (simd * 8 + r) * KEYS + lane;
    float score = scores[at];
    if (CAPPED) {
      score = factors[1] * metal::tanh(score / factors[1]);
    }
    const float higher = metal::max(tops[r], metal::simd_max(seen ? score : LOWEST));
    const float kept = metal::exp(tops[r] - higher);
    const float weight = seen ? metal::exp(score - higher) : 0;
    tops[r] = higher;
    masses[r] = masses[r] * kept + metal::simd_sum(weight);
    scores[at] = weight;
    if (lane < 8) {
      diagonals[simd * 64 + r * 8 + lane] = lane == r ? kept : 0;
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // and nobody needs the keys

  for (uint index = worker; index < KEYS * D; index += SIMDS * 32) {
    const uint position = start + index / D;
    float value = 0;
    if (position < end) {
      const uint block = block_table[table + position / PAGE];
      const ulong vector = (ulong(block) * PAGE + position % PAGE) * K + kv_head;
      value = page_number<V_NIBBLES, D>(v_pages, vector, index % D) * (SCALED ? v_scales[vector] : 1);
    }
    tile[index] = value;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  metal::simdgroup_matrix<float, 8, 8> diagonal;
  metal::simdgroup_load(diagonal, diagonals + simd * 64, 8);
  for (uint i = 0; i < PIECES; i++) {
    metal::simdgroup_multiply(sums[i], diagonal, sums[i]);
  }
  for (uint j = 0; j < KEYS / 8; j++) {
    metal::simdgroup_matrix<float, 8, 8> weights;
    metal::simdgroup_load(weights, scores + simd * 8 * KEYS + 8 * j, KEYS);
    for (uint i = 0; i < PIECES; i++) {
      metal::simdgroup_matrix<float, 8, 8> values;
      metal::simdgroup_load(values, tile + 8 * j * D + 8 * i, D);
      metal::simdgroup_multiply_accumulate(sums[i], weights, values, sums[i]);
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // nobody needs the values
}

for (uint r = 0; r < 8; r++) {
  const uint vector = first_vector + simd * 8 + r;
  float kept = 1;
  float mass = masses[r];
  if (SINKS) {
    const float sink = sinks[kv_head * GROUP + vector % GROUP];
    const float higher = metal::max(tops[r], sink);
    kept = metal::exp(tops[r] - higher);
    mass = mass * kept + metal::exp(sink - higher);
  }
  if (lane == r) {
    shares[simd * 8 + r] = kept / mass;  // of a vector too many: never written
  }
}
for (uint i = 0; i < PIECES; i++) {
  metal::simdgroup_store(sums[i], tile + simd * 8 * D + 8 * i, D);
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
for (uint index = worker; index < ROWS * D; index += SIMDS * 32) {
  const uint vector = first_vector + index / D;
  const uint head = kv_head * GROUP + vector % GROUP;
  const ulong token = first_token + vector / GROUP;
  if (vector < vectors) {
    out[(token * H + head) * D + index % D] = tile[index] * shares[index / D];
  }
}
