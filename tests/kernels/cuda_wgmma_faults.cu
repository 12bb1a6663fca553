// One product of a warpgroup: right with fault 0, and wrong in one way with each other.
#include "vx_hopper.h"

// y (64, 64) = x (64, 64) x^T, by threads 0 to 127
extern "C" __global__ void __launch_bounds__(256) wgmma_fault(const elem* x, float* y, int fault) {
  VX_DYNAMIC_SHARED_TILES(memory);
  elem* tile = reinterpret_cast<elem*>(memory) + (fault == 7 ? 64 : 0);
  float d[32];
  for (int i = 0; i < 32; i++) d[i] = 0.f;
  if (threadIdx.x >= 128) {
    for (int i = threadIdx.x - 128; i < 64 * 8; i += 128) {
      int row = i / 8, column = i % 8 * 8;
      elem* to = tile + (fault == 6 ? row * 64 + column : vx_swizzled(row, column, 64));
      vx_cp_async16(to, x + row * 64 + column, 16);
    }
    vx_cp_commit();
    if (fault != 5) vx_cp_wait<0>();
    if (fault != 1) vx_fence_async();
  }
  if (fault != 2) __syncthreads();
  if (threadIdx.x < 128 && !(fault == 10 && threadIdx.x == 77)) {
    u64 a = vx_matrix_descriptor(tile, 0), b = a;
    if (fault == 8) b = vx_matrix_descriptor(tile + 4, 0);
    if (fault == 9) b ^= 3ull << 62;
    if (fault == 11) b = vx_matrix_at(b, threadIdx.x == 5 ? 32 : 0);
    if (fault == 12) b = vx_matrix_at(b, 8192);
    if (fault == 13) b -= 32ull << 32;  // rows of the first group again for the next
    if (fault != 3) vx_wgmma_fence();
    for (int step = 0; step < 4; step++)
      vx_wgmma(d, vx_matrix_at(a, step * 32), vx_matrix_at(b, step * 32), step > 0, elem());
    u32 fragment[4] = {0, 0, 0, 0};
    if (fault == 20) vx_wgmma(d, fragment, b, true, elem());
    if (fault != 15) vx_wgmma_commit();
    if (fault == 19 && threadIdx.x == 0) vx_cp_async16(tile, x, 16);
    if (fault == 20) fragment[1] = threadIdx.x;
    if (fault == 14) tile[0] = x[1];
    if (fault == 4) y[0] = d[0];
    if (fault == 16) d[3] = 1.f;
    if (fault != 17) vx_wgmma_wait<0>();
    vx_wgmma_pin(d);
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < 32 && fault != 17; i++)
      y[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + column + i % 2] = d[i];
    if (fault == 18) vx_cp_async16(tile + threadIdx.x * 8, x, 16);
  }
  if (fault == 18) {
    vx_cp_commit();
    vx_cp_wait<0>();
  }
}
VX_EXPORT(wgmma_fault)
