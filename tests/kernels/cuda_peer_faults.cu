// Kernels that hand 64 numbers from rank 0 to rank 1 and back, with one fault each.
#include "vx.h"

// shared: numbers of both ranks, then a word for each, which the other one stores
struct Shared {
  float numbers[2][64];
  u32 words[2];
};

VX_DEV void wait_until(const u32* word, u32 value) {
  while ((int)(vx_load_acquire(word) - value) < 0) {
  }
}

// Each puts its numbers down three times and adds up the other's
template <bool STORED, bool LOADED, bool BEFORE, bool BEHIND, bool TURNS, bool TOLD>
VX_DEV void exchange(Shared* a, Shared* b, float* y, int rank) {
  int i = threadIdx.x;
  for (u32 call = 1; call <= 3; call++) {
    Shared* at = TURNS && call % 2 ? a : b;
    at->numbers[rank][i] = (float)(64 * rank + i) * call;
    if (BEFORE) __syncthreads();
    if (i == 0) {
      if (!TOLD) {
      } else if (STORED) {
        vx_store_release(&a->words[1 - rank], call);
      } else {
        a->words[1 - rank] = call;
      }
      if (LOADED) {
        wait_until(&a->words[rank], call);
      } else {
        wait_until(&b->words[rank], 0);
        (void)*(volatile u32*)&a->words[rank];
      }
    }
    if (BEHIND) __syncthreads();
    y[i] += at->numbers[1 - rank][63 - i];
  }
}

#define EXCHANGE(entry, ...)                                                                       \
  extern "C" __global__ void __launch_bounds__(64) entry(Shared* a, Shared* b, float* y, int rank) { \
    exchange<__VA_ARGS__>(a, b, y, rank);                                                          \
  }                                                                                                \
  VX_EXPORT(entry)
EXCHANGE(right, true, true, true, true, true, true)
EXCHANGE(stored_plainly, false, true, true, true, true, true)
EXCHANGE(loaded_plainly, true, false, true, true, true, true)
EXCHANGE(told_before_the_barrier, true, true, false, true, true, true)
EXCHANGE(read_before_the_barrier, true, true, true, false, true, true)
EXCHANGE(written_again_at_once, true, true, true, true, false, true)
EXCHANGE(never_told, true, true, true, true, true, false)
