// wrappers: what each PTX wrapper of vx_ptx.h computes, once, for one warp. A GPU's results are the
//           proof that the emulator's twins in device.h do the same; models do not launch it.
//
// Layout: a (16, 16) and b (8, 16) of elem; words (96, 4) of u32.
//         products (2, 16, 8): a * b^T as the first of a sum, and once more added to it;
//         fused (32): fma of two elements each of a lane's first three pairs of a;
//         coded (16, 8): a product of FP8 codes between 0.5 and 2, of the bytes of rows 0 .. 31 and 32 .. 47 of
//         words, from sm_89 on;
//         permuted (4, 32): bytes of words 0 and 1 of row i in four orders, of which two spread signs;
//         fragments (2, 32, 4): ldmatrix of the first 32 rows of words, plain and transposed;
//         copied (2, 32, 4): rows 32 .. 63 by cp.async, of row i the first i % 17 bytes, then whole;
//         loaded (32, 4): rows 64 .. 95; dots (32): dp4a of words 0 and 1 onto word 2 of those.
// Grid:   one block of 32 threads.
// Floor:  none.
#include "vx.h"

extern "C" __global__ void __launch_bounds__(32)
wrappers(const elem* __restrict__ a, const elem* __restrict__ b, const u32* __restrict__ words,
         float* __restrict__ products, u32* __restrict__ fused,
         float* __restrict__ coded, u32* __restrict__ permuted, u32* __restrict__ fragments, u32* __restrict__ copied,
         u32* __restrict__ loaded, int* __restrict__ dots) {
  __shared__ __align__(128) u32 tile[32 * 4];
  __shared__ __align__(128) u32 part[32 * 4];
  __shared__ __align__(128) u32 whole[32 * 4];
  int lane = threadIdx.x, row = lane / 4, column = lane % 4 * 2;

  const u32* pairs_a = (const u32*)a;  // two neighbouring elements each
  const u32* pairs_b = (const u32*)b;
  u32 of_a[4], of_b[2];
  float d[4];
  for (int i = 0; i < 4; i++) of_a[i] = pairs_a[(row + i % 2 * 8) * 8 + column / 2 + i / 2 * 4];
  for (int i = 0; i < 2; i++) of_b[i] = pairs_b[row * 8 + column / 2 + i * 4];
  vx_mma_first(d, of_a, of_b, elem());
  for (int i = 0; i < 4; i++) products[(row + i / 2 * 8) * 8 + column + i % 2] = d[i];
  vx_mma(d, of_a, of_b, elem());
  for (int i = 0; i < 4; i++) products[(16 + row + i / 2 * 8) * 8 + column + i % 2] = d[i];
  fused[lane] = vx_fma2(of_a[0], of_a[1], of_a[2], elem());
  float sums[4] = {};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  u32 codes_a[4], codes_b[2];
  for (int i = 0; i < 4; i++)
    codes_a[i] = words[(row + i % 2 * 8) * 8 + column / 2 + i / 2 * 4] & 0x8f8f8f8fu | 0x30303030u;
  for (int i = 0; i < 2; i++) codes_b[i] = words[(16 + row) * 8 + column / 2 + i * 4] & 0x8f8f8f8fu | 0x30303030u;
  vx_mma_e4m3(sums, codes_a, codes_b);
#endif
  for (int i = 0; i < 4; i++) coded[(row + i / 2 * 8) * 8 + column + i % 2] = sums[i];

  const u32 orders[4] = {0x0123, 0x7654, 0x1804, 0xdaf9};
  for (int i = 0; i < 4; i++)
    permuted[32 * i + lane] = vx_permute(words[lane * 4], words[lane * 4 + 1], orders[i]);

  for (int i = 0; i < 4; i++) tile[lane * 4 + i] = words[lane * 4 + i];
  __syncwarp();
  u32 plain[4], transposed[4];
  vx_ldmatrix_x4(plain, tile + lane * 4);
  vx_ldmatrix_x4_trans(transposed, tile + lane * 4);
  for (int i = 0; i < 4; i++) fragments[lane * 4 + i] = plain[i];
  for (int i = 0; i < 4; i++) fragments[(32 + lane) * 4 + i] = transposed[i];

  vx_cp_async16(part + lane * 4, words + (32 + lane) * 4, lane % 17);
  vx_cp_commit();
  vx_cp_async16(whole + lane * 4, words + (32 + lane) * 4, 16);
  vx_cp_commit();
  vx_cp_wait<1>();
  for (int i = 0; i < 4; i++) copied[lane * 4 + i] = part[lane * 4 + i];
  vx_cp_wait<0>();
  for (int i = 0; i < 4; i++) copied[(32 + lane) * 4 + i] = whole[lane * 4 + i];

  uint4 once = vx_load_once(words + (64 + lane) * 4);
  loaded[lane * 4] = once.x, loaded[lane * 4 + 1] = once.y;
  loaded[lane * 4 + 2] = once.z, loaded[lane * 4 + 3] = once.w;
  dots[lane] = vx_dp4a((int)once.x, (int)once.y, (int)once.z);
}
VX_EXPORT(wrappers)
