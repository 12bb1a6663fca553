// recurrence: S = decay * S; S += k u^T; out = S^T q, token by token, over a state S (Dk, Dv) of each row and head.
//
// Layout: qkv (T, 2 Hk Dk + H Dv) of elem: q | k | v; a (T, H), or (T, H Dk) with `channels`, and b (T, H) of elem; a_log, d
//         (H), dt_bias (as wide as a) of f32; out (T, H Dv) of elem. A slot of states holds (H, Dk, Dv) of f32,
//         `slot_floats` behind the slot before. b is null for the rule ssd. VX_VEC divides Dk. state_after (T): where
//         states are kept after a token that is not its row's last, -1: nowhere; with VX_KEEPS 0 it is not read, which
//         saves registers.
// Grid:   (R, H, ceil(Dv / 16)), 128 threads: eight for a column, each with VX_KEYS neighbouring rows of S in registers.
//         Threads of a column are neighbours, so that sums over rows are a shuffle; no shared memory, no barrier.
// Floor:  bytes of a decode step: the state once in and once out. A prompt: 4 Dk operations a token and column, one token
//         after the other, whatever its chunks, so that its bits do not depend on them.
#include "vx.h"

#ifndef VX_KEYS
#define VX_KEYS 16
#endif
#ifndef VX_KEEPS
#define VX_KEEPS 1
#endif
#define PARTS 8

// The rows of a key or a query that this thread has, as floats; 0 beyond the last one.
VX_DEV void load_rows(float (&v)[VX_KEYS], const elem* x, int first, int keys) {
#pragma unroll
  for (int i = 0; i < VX_KEYS; i += VX_VEC) {
    float some[VX_VEC];
    if (first + i < keys) load(some, x + first + i);
#pragma unroll
    for (int j = 0; j < VX_VEC; j++) v[i + j] = first + i < keys ? some[j] : 0.f;
  }
}

// The rows of a state that this thread has, `values` numbers apart.
VX_DEV void store_rows(float* state, const float (&s)[VX_KEYS], int first, int keys, int values) {
  state += (size_t)first * values;  // one address that moves: as many as rows would take registers
#pragma unroll
  for (int i = 0; i < VX_KEYS; i++, state += values)
    if (first + i < keys) *state = s[i];
}

// Sum over the threads of a column.
VX_DEV float column_sum(float v) {
#pragma unroll
  for (int lanes = PARTS / 2; lanes > 0; lanes >>= 1) v += __shfl_xor_sync(VX_ALL, v, lanes);
  return v;
}

VX_DEV float dot_rows(const float (&x)[VX_KEYS], const float (&y)[VX_KEYS]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < VX_KEYS; i++) sum += x[i] * y[i];
  return column_sum(sum);
}

VX_DEV void times(float (&v)[VX_KEYS], float factor) {
#pragma unroll
  for (int i = 0; i < VX_KEYS; i++) v[i] *= factor;
}

// ln(1 + exp x) within limits; NaN stays NaN.
VX_DEV float step_size(float x, float low, float high) {
  float dt = (x > 0.f ? x : 0.f) + log1pf(expf(-fabsf(x)));
  return dt < low ? low : dt > high ? high : dt;
}

extern "C" __global__ void __launch_bounds__(128)
recurrence(const elem* __restrict__ qkv, const elem* __restrict__ a, const elem* __restrict__ b,
           const float* __restrict__ a_log, const float* __restrict__ dt_bias, const float* __restrict__ d,
           const int* __restrict__ query_start, const int* __restrict__ state_from, const int* __restrict__ state_to,
           const int* __restrict__ state_after, float* states, elem* __restrict__ out, int heads, int key_heads, int keys, int values, int channels,
           int tiled, long long slot_floats, float scale, float beta, float norm_eps, float dt_min, float dt_max) {
  int row = blockIdx.x, head = blockIdx.y, source = state_from[row], target = state_to[row];
  if (target < 0) return;  // padding
  int first = threadIdx.x % PARTS * VX_KEYS, column = blockIdx.z * (128 / PARTS) + threadIdx.x / PARTS;
  int key_head = tiled ? head % key_heads : head / (heads / key_heads);
  bool inside = column < values;
  size_t at = (size_t)head * keys * values + column;
  float s[VX_KEYS];
#pragma unroll
  for (int i = 0; i < VX_KEYS; i++) {
    bool held = source >= 0 && inside && first + i < keys;
    s[i] = held ? states[source * slot_floats + at + (size_t)(first + i) * values] : 0.f;
  }
  float rate = -expf(a_log[head]);
  int width = 2 * key_heads * keys + heads * values;
  for (int token = query_start[row]; token < query_start[row + 1]; token++) {
    const elem* x = qkv + (size_t)token * width;
    float k[VX_KEYS], q[VX_KEYS], strength = 0.f;
    load_rows(q, x + key_head * keys, first, keys);
    load_rows(k, x + (key_heads + key_head) * keys, first, keys);
    if (b) {
      times(q, 1.f / sqrtf(dot_rows(q, q) + norm_eps));
      times(k, 1.f / sqrtf(dot_rows(k, k) + norm_eps));
    }
    size_t of_head = (size_t)token * heads + head;
    if (channels) {
#pragma unroll
      for (int i = 0; i < VX_KEYS; i++) {
        int c = first + i < keys ? first + i : 0;
        float dt = step_size(to_float(a[of_head * keys + c]) + dt_bias[head * keys + c], dt_min, dt_max);
        s[i] *= expf(rate * dt);
      }
    } else {
      strength = step_size(to_float(a[of_head]) + dt_bias[head], dt_min, dt_max);
      times(s, expf(rate * strength));
    }
    float v = inside ? to_float(x[2 * key_heads * keys + head * values + column]) : 0.f;
    if (b) strength = beta * (1.f / (1.f + expf(-to_float(b[of_head]))));
    float u = strength * (b ? v - dot_rows(s, k) : v);
#pragma unroll
    for (int i = 0; i < VX_KEYS; i++) s[i] += k[i] * u;
    float y = dot_rows(s, q) * scale + (d ? d[head] * v : 0.f);
    if (inside && first == 0) out[of_head * values + column] = from_float<elem>(y);
#if VX_KEEPS
    int kept = state_after[token];
    if (kept >= 0 && inside) store_rows(states + kept * slot_floats + at, s, first, keys, values);
#endif
  }
  if (inside) store_rows(states + target * slot_floats + at, s, first, keys, values);
}
VX_EXPORT(recurrence)
