// A query, key or value of one token, on its way from the QKV projection: normalised, rotated, stored by a warp.
#pragma once
#include "kv_types.h"
#include "vx.h"

// The rotated value of dimension i of a head
VX_DEV float rotated(const float* head, const float* table, int i, int rotary_dim,
                     int interleaved) {
  int half = rotary_dim / 2;
  if (i >= rotary_dim) return head[i];
  int pair = interleaved ? i / 2 : i % half;
  bool first = interleaved ? i % 2 == 0 : i < half;
  float partner = head[interleaved ? i ^ 1 : (first ? i + half : i - half)];
  float cosine = table[pair], sine = table[half + pair];
  return head[i] * cosine + (first ? -partner : partner) * sine;
}

// How queries and keys are rotated and normalised. eps below 0: norms follow the rotation.
struct Turn {
  const float* table;  // cos then sin of the token's position, or null
  int rotary_dim, interleaved;
  float eps;
};

// A warp brings head `in` through `row`, VX_HEAD floats of shared memory, to `query`, or if that is null to a place in
// the pages with its scale. norm: (VX_HEAD) or null.
template <int VEC>
VX_DEV void store_head(const elem* in, float* row, const float* norm, const Turn& turn, elem* query, kv_elem* page,
                       float* page_scale) {
  int lane = threadIdx.x % 32;
  float ss = 0.f;
  for (int i = lane * VEC; i < VX_HEAD; i += 32 * VEC) {
    float v[VEC];
    load(v, in + i);
#pragma unroll
    for (int j = 0; j < VEC; j++) ss += v[j] * v[j], row[i + j] = v[j];
  }
  if (norm && turn.eps > 0.f) {
    float scale = rsqrtf(warp_sum(ss) / VX_HEAD + turn.eps);
    for (int i = lane * VEC; i < VX_HEAD; i += 32 * VEC)
#pragma unroll
      for (int j = 0; j < VEC; j++) row[i + j] *= scale * norm[i + j];
  }
  __syncwarp();

  bool rotates = turn.table;
  auto value = [&](int i) {
    return rotates ? rotated(row, turn.table, i, turn.rotary_dim, turn.interleaved) : row[i];
  };
  if (norm && turn.eps < 0.f) {
    float turned[(VX_HEAD + 31) / 32];
    ss = 0.f;
    for (int i = lane, n = 0; i < VX_HEAD; i += 32, n++) {
      turned[n] = value(i);
      ss += turned[n] * turned[n];
    }
    float scale = rsqrtf(warp_sum(ss) / VX_HEAD - turn.eps);
    __syncwarp();  // all lanes have read what they rotate
    for (int i = lane, n = 0; i < VX_HEAD; i += 32, n++) row[i] = turned[n] * scale * norm[i];
    __syncwarp();
    rotates = false;
  }
  CodeScale code = {};
#if VX_KV_SCALED
  u32 top = 0;
  for (int i = lane; i < VX_HEAD; i += 32) top = max(top, __float_as_uint(fabsf(value(i))));
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) top = max(top, __shfl_xor_sync(VX_ALL, top, lanes));
  code = code_scale(top);
  if (!query && lane == 0) *page_scale = code.scale;
#endif
  for (int i = lane * VEC; i < VX_HEAD; i += 32 * VEC) {
    float v[VEC];
#pragma unroll
    for (int j = 0; j < VEC; j++) v[j] = value(i + j);
    if (query) {
      store(query + i, v);
    } else {
      kv_write(page + i, v, code);
    }
  }
}
