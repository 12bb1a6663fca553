// The draw of vllmx_core.sampling: Philox4x32-10 (Salmon et al., SC11) keyed by the request's seed,
// counted by id and position, and Gumbel noise made of it.
#pragma once
#include "vx.h"

// Words of the ids 4 * block .. 4 * block + 3
VX_DEV void philox(u32 (&words)[4], u32 block, u32 position, u64 seed) {
  u32 c0 = block, c1 = position, c2 = 0, c3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// In (0, 1), exact in f32
VX_DEV float uniform(u32 word) { return (float)(word >> 9) * 0x1p-23f + 0x1p-24f; }

// What the reference adds: rounded once, from f64
VX_DEV float gumbel(u32 word) { return (float)-log(-log((double)uniform(word))); }

// The same within GUMBEL_ERROR, without f64, which most GPUs have little of
VX_DEV float gumbel_near(u32 word) { return -logf(-logf(uniform(word))); }
#define GUMBEL_ERROR 1e-5f
#define MOST_NOISE 17.f  // and an approximate x is off by 1e-7 of its magnitude, that of the score and this
