// PTX wrappers of sm_90a alone: matrix products of a warpgroup that run by themselves (wgmma). The
// emulator has their twins in ../emulator/native/hopper.h. PTX ISA, "Asynchronous warpgroup level
// matrix instructions".
//
// A warpgroup is four warps, the first of them a multiple of four; its threads call all of these
// together. What a product touches is not to be touched until it was waited for: the sums, a
// fragment of A in registers, the shared memory.
//
// A tile in shared memory lies in chunks of 64 columns of 16-bit elements, a chunk row after row: a
// row is 128 bytes, and its eight units of 16 bytes are swizzled (`vx_swizzled`). Chunks begin at
// multiples of 1024 bytes.
#pragma once
#include "vx.h"

#define VX_CHUNK 64  // columns

// Element (row, column) of a tile of so many rows; column a multiple of 8
VX_DEV int vx_swizzled(int row, int column, int rows) {
  int chunk = column / VX_CHUNK, unit = column / 8 % 8;
  return (chunk * rows + row) * VX_CHUNK + (unit ^ row % 8) * 8;
}

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define VX_DYNAMIC_SHARED_TILES(name) extern __shared__ __align__(1024) unsigned char name[]

// What was written to shared memory before becomes visible to wgmma: wgmma does not read through
// the path that stores and cp.async write by.
VX_DEV void vx_fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers that products use may have been touched before, and are the products' from here on
VX_DEV void vx_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
VX_DEV void vx_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N committed groups of products are under way
template <int N> VX_DEV void vx_wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving other uses of these sums over a fence or a wait
template <int N> VX_DEV void vx_wgmma_pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// 2^x; the error of ex2.approx is 2 units in the last place
VX_DEV float vx_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

// d (64 x N f32) = A (64 x 16) B (16 x N), added to what is there where `add` is set. Warp w of the
// warpgroup has rows 16 w .. 16 w + 15; d[4 i + e] of a lane is row lane / 4 + e / 2 * 8, column
// 8 i + lane % 4 * 2 + e % 2.
#define VX_WGMMA_D8(d, i)                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define VX_WGMMA_D32(d, i) \
  VX_WGMMA_D8(d, i), VX_WGMMA_D8(d, i + 8), VX_WGMMA_D8(d, i + 16), VX_WGMMA_D8(d, i + 24)
#define VX_WGMMA_D64(d, i) VX_WGMMA_D32(d, i), VX_WGMMA_D32(d, i + 32)
#define VX_WGMMA_T32                                                        \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19," \
  "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define VX_WGMMA_T64                                                                      \
  VX_WGMMA_T32                                                                            \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52," \
  "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// First, A and B by descriptor, a row of A and a column of B contiguous ("K-major"); second, A in
// registers as fragments of m16n8k16, and B with its rows contiguous ("MN-major"). The placeholders
// after the sums: descriptors or fragments, and whether to add.
#define VX_WGMMA(N, SUMS, TYPE, KIND, P0, P1, P2, P3, P4, P5)                                   \
  VX_DEV void vx_wgmma(float (&d)[SUMS], u64 a, u64 b, bool add, KIND) {                        \
    asm volatile("{.reg .pred p; setp.ne.b32 p," P2 ",0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE                 \
                 " {" VX_WGMMA_T##SUMS "}," P0 "," P1 ",p,1,1,0,0;}"                            \
                 : VX_WGMMA_D##SUMS(d, 0)                                                       \
                 : "l"(a), "l"(b), "r"((int)add)                                                \
                 : "memory");                                                                   \
  }                                                                                             \
  VX_DEV void vx_wgmma(float (&d)[SUMS], const u32 (&a)[4], u64 b, bool add, KIND) {            \
    asm volatile("{.reg .pred p; setp.ne.b32 p," P5 ",0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE                 \
                 " {" VX_WGMMA_T##SUMS "},{" P0 "," P1 "," P2 "," P3 "}," P4 ",p,1,1,1;}"       \
                 : VX_WGMMA_D##SUMS(d, 0)                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add)            \
                 : "memory");                                                                   \
  }
VX_WGMMA("64", 32, "bf16", bf16, "%32", "%33", "%34", "%35", "%36", "%37")
VX_WGMMA("64", 32, "f16", f16, "%32", "%33", "%34", "%35", "%36", "%37")
VX_WGMMA("128", 64, "bf16", bf16, "%64", "%65", "%66", "%67", "%68", "%69")
VX_WGMMA("128", 64, "f16", f16, "%64", "%65", "%66", "%67", "%68", "%69")
#else
#define VX_DYNAMIC_SHARED_TILES(name) VX_DYNAMIC_SHARED(name)
#include "hopper.h"
#endif

// What a product must know of a tile's part in shared memory: where it begins, the bytes from one
// chunk of 64 columns to the next (used where rows are contiguous along N), and from eight rows to
// the next eight; swizzle of 128 bytes.
VX_DEV u64 vx_matrix_descriptor(const void* p, u32 chunk_bytes) {
  const u64 swizzle_128_bytes = 1ull << 62, eight_rows = 1024;
  u32 address = vx_shared_address(p);
  return (u64)(address >> 4) | (u64)(chunk_bytes >> 4) << 16 | eight_rows >> 4 << 32 |
         swizzle_128_bytes;
}
// The descriptor of what lies so many bytes further
VX_DEV u64 vx_matrix_at(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }
