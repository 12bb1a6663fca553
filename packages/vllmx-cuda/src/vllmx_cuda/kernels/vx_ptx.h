// PTX wrappers for the device; the emulator has a twin of each in device.h. Included by vx.h alone.
#pragma once

VX_DEV u32 vx_shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

#if __CUDA_ARCH__ < 800
// One of the two steps of 8 columns that sm_75 takes a product of f16 in; of bf16 it has none
VX_DEV void vx_mma_half(float (&d)[4], u32 top, u32 bottom, u32 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(top), "r"(bottom), "r"(b));
}
#endif
// D (16x8 f32) += A (16x16, row-major) * B (16x8, column-major), tensor cores
VX_DEV void vx_mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
VX_DEV void vx_mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], f16) {
#if __CUDA_ARCH__ < 800
  vx_mma_half(d, a[0], a[1], b[0]);
  vx_mma_half(d, a[2], a[3], b[1]);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
// D = A * B: the first product of a sum
VX_DEV void vx_mma_first(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.f));
}
VX_DEV void vx_mma_first(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], f16 kind) {
#if __CUDA_ARCH__ < 800
  d[0] = d[1] = d[2] = d[3] = 0.f;
  vx_mma(d, a, b, kind);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.f));
#endif
}
#if __CUDA_ARCH__ >= 890
// D (16x8 f32) += A (16x32, row-major) * B (32x8, column-major), both of FP8 e4m3. sm_90 and sm_100, which have
// other instructions for it, make f16 of the codes.
VX_DEV void vx_mma_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif
// a * b + c of two elements each, rounded once
VX_DEV u32 vx_fma2(u32 a, u32 b, u32 c, bf16) {
  u32 d;
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
VX_DEV u32 vx_fma2(u32 a, u32 b, u32 c, f16) {
  u32 d;
  asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Byte i of the result is the byte that nibble i of the selector names, of a 0 to 3, of b 4 to 7; with 8 more: all
// bits are its sign. (__byte_perm promises the first alone.)
VX_DEV u32 vx_permute(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// Four 8x8 matrices of 16-bit elements; lane 8m + i gives the address of row i of matrix m, 16-byte
// aligned. Afterwards r[m] of a lane holds row lane / 4, columns 2 (lane % 4) and the next;
// transposed: column lane / 4, those rows.
VX_DEV void vx_ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(vx_shared_address(row))
               : "memory");
}
VX_DEV void vx_ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(vx_shared_address(row))
               : "memory");
}

// 16 bytes from global to shared memory while the thread goes on; bytes from `bytes` on are zeroed. sm_75,
// which cannot, copies them at once.
VX_DEV void vx_cp_async16(void* shared, const void* global, int bytes) {
#if __CUDA_ARCH__ < 800
  uint4 raw = make_uint4(0, 0, 0, 0);
  if (bytes > 0) raw = *reinterpret_cast<const uint4*>(global);
  u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (bytes < 4 * i + 4) words[i] &= bytes > 4 * i ? (1u << 8 * (bytes - 4 * i)) - 1 : 0;
  *reinterpret_cast<uint4*>(shared) = make_uint4(words[0], words[1], words[2], words[3]);
#else
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;"
               :
               : "r"(vx_shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
#endif
}
VX_DEV void vx_cp_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most N committed groups of this thread are under way
template <int N> VX_DEV void vx_cp_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// 16 bytes of weights that are read once: past L1, whole 256-byte lines into L2
VX_DEV uint4 vx_load_once(const void* p) {
  uint4 r;
#if __CUDA_ARCH__ < 800
  r = __ldg(reinterpret_cast<const uint4*>(p));
#else
  asm("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];"
      : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
      : "l"(p));
#endif
  return r;
}

// For launches that may begin while the one before them runs (sm_90 on): until this wait, a thread touches nothing but
// weights. From here on the launch behind may begin as well.
VX_DEV void vx_wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// sum + the dot product of the four signed bytes of a and b
VX_DEV int vx_dp4a(int a, int b, int sum) { return __dp4a(a, b, sum); }

// A word by which GPUs tell each other, in memory of any of them or of the host: who loads what was stored sees all
// that the storing thread had seen or written before.
VX_DEV void vx_store_release(u32* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
VX_DEV u32 vx_load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
