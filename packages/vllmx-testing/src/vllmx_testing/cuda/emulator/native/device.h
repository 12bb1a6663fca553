// The device side of the emulator: what a kernel sees instead of CUDA. Every CUDA thread is a fiber
// that runs until it reaches a barrier or a warp-wide operation. Number types are NVIDIA's own
// (cuda_fp16.h, cuda_bf16.h and cuda_fp8.h compile for the host).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("emulated_shared")))
#define EMU_API extern "C" __attribute__((visibility("default")))
// Not instrumented: the emulator's own accesses are not the kernel's
#define EMU_RAW __attribute__((no_sanitize("thread"), no_sanitize("undefined"), noinline))

#define VX_DEV inline
#define VX_DYNAMIC_SHARED(name) unsigned char* const name = emu::dynamic_shared
#define VX_EXPORT(entry) \
  EMU_API EMU_RAW void emu_entry_##entry(void** arguments) { emu::call(entry, arguments); }

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
static const int warpSize = 32;

namespace emu {
typedef unsigned char Slot[64];  // what one lane hands to a warp-wide operation
enum Operation { SHUFFLE = 1, VOTE, SYNCWARP, MMA_BF16, MMA_F16, MMA_E4M3, LDMATRIX, REDUCE };
extern unsigned char* dynamic_shared;
extern int lane;

// Deposits `bytes`, waits for every lane of `mask`, returns the 32 slots; `tile` gets the product
// of an MMA, made once for the warp.
const Slot* exchange(unsigned mask, const void* in, size_t bytes, Operation op,
                     const float** tile = nullptr);
void block_barrier();
void fail(const char* format, ...);
void cp_async(void* to, const void* from, int bytes, int source_bytes);
void cp_commit();
void cp_wait(int keep);
// Bounds, alignment, races; nothing in the fast build
void check(const void* p, size_t bytes, size_t align, bool write, bool atomic);
void checker_arrival(const unsigned* p);
void checker_fence();
void checker_wait();
// Words by which ranks tell each other; see peers.cpp
void store_release(unsigned* p, unsigned value);
unsigned load_acquire(const unsigned* p);

template <class... A, size_t... I>
EMU_RAW void call_with(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*(typename std::remove_reference<A>::type*)arguments[I]...);
}
template <class... A> EMU_RAW void call(void (*kernel)(A...), void** arguments) {
  call_with(kernel, arguments, std::index_sequence_for<A...>());
}
}  // namespace emu

// ---- synchronisation and warp-wide operations

inline void __syncthreads() { emu::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emu::exchange(mask, &mask, 4, emu::SYNCWARP);
}
inline void __threadfence() { emu::checker_fence(); }
inline void __threadfence_block() {}

template <class T> EMU_RAW T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  const emu::Slot* slots = emu::exchange(mask, &v, sizeof v, emu::SHUFFLE);
  int from = (emu::lane & ~(width - 1)) | (source & (width - 1));
  if (!(mask >> from & 1)) emu::fail("shuffle reads lane %d, which mask %08x leaves out", from, mask);
  memcpy(&v, slots[from], sizeof v);
  return v;
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
  int from = (emu::lane & (width - 1)) ^ bits;
  return __shfl_sync(mask, v, from < width ? from : emu::lane, width);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, int by, int width = 32) {
  int from = (emu::lane & (width - 1)) + by;
  return __shfl_sync(mask, v, from < width ? from : emu::lane, width);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, int by, int width = 32) {
  int from = (emu::lane & (width - 1)) - by;
  return __shfl_sync(mask, v, from >= 0 ? from : emu::lane, width);
}
EMU_RAW inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const emu::Slot* slots = emu::exchange(mask, &predicate, 4, emu::VOTE);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1 && *(const int*)slots[i]) bits |= 1u << i;
  return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
template <class F> EMU_RAW unsigned emu_reduce(unsigned mask, unsigned v, F join) {
  const emu::Slot* slots = emu::exchange(mask, &v, 4, emu::REDUCE);
  bool first = true;
  unsigned result = 0;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) {
      unsigned other = *(const unsigned*)slots[i];
      result = first ? other : join(result, other);
      first = false;
    }
  return result;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) {
  return emu_reduce(mask, v, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) {
  return emu_reduce(mask, v, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) {
  return emu_reduce(mask, v, [](unsigned a, unsigned b) { return a < b ? a : b; });
}

// ---- atomics: fibers never run at once, so a plain read-modify-write is atomic

template <class T, class F> EMU_RAW T emu_atomic(T* p, F change) {
  emu::check(p, sizeof(T), sizeof(T), true, true);
  T old = *p;
  *p = change(old);
  return old;
}
template <class T> T atomicAdd(T* p, T v) {
  return emu_atomic(p, [v](T old) { return T(old + v); });
}
template <class T> T atomicMax(T* p, T v) {
  return emu_atomic(p, [v](T old) { return old > v ? old : v; });
}
template <class T> T atomicMin(T* p, T v) {
  return emu_atomic(p, [v](T old) { return old < v ? old : v; });
}
template <class T> T atomicOr(T* p, T v) {
  return emu_atomic(p, [v](T old) { return T(old | v); });
}
template <class T> T atomicExch(T* p, T v) {
  return emu_atomic(p, [v](T) { return v; });
}
template <class T> T atomicCAS(T* p, T expected, T v) {
  return emu_atomic(p, [expected, v](T old) { return old == expected ? v : old; });
}
// What a block announces its results by, and learns of other blocks': the checker wants fences around it
EMU_RAW inline unsigned atomicInc(unsigned* p, unsigned limit) {
  emu::checker_arrival(p);
  unsigned old = *p;
  *p = old >= limit ? 0u : old + 1;
  return old;
}

// ---- arithmetic

template <class T> T __ldg(const T* p) { return *p; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
// Rounded once each and never contracted to a fused multiply-add, as on the device
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __float2int_rn(float v) { return (int)nearbyintf(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline float __int_as_float(int i) {
  float f;
  memcpy(&f, &i, 4);
  return f;
}
inline float __uint_as_float(unsigned i) { return __int_as_float((int)i); }
inline int __float_as_int(float f) {
  int i;
  memcpy(&i, &f, 4);
  return i;
}
inline unsigned __float_as_uint(float f) { return (unsigned)__float_as_int(f); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++)
    result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

// ---- twins of vx_ptx.h. Fragment layout as in the PTX ISA, "Matrix fragments for mma.m16n8k16".

EMU_RAW inline void emu_mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                            emu::Operation op) {
  unsigned in[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const float* tile;  // 16x8, row-major
  emu::exchange(0xffffffffu, in, sizeof in, op, &tile);
  int row = emu::lane >> 2, column = 2 * (emu::lane & 3);
  for (int i = 0; i < 4; i++) d[i] += tile[8 * (row + 8 * (i >> 1)) + column + (i & 1)];
}
inline void vx_mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16) {
  emu_mma(d, a, b, emu::MMA_BF16);
}
inline void vx_mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) {
  emu_mma(d, a, b, emu::MMA_F16);
}
// "Matrix fragments for mma.m16n8k32"
inline void vx_mma_e4m3(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  emu_mma(d, a, b, emu::MMA_E4M3);
}
template <class T>
void vx_mma_first(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], T kind) {
  d[0] = d[1] = d[2] = d[3] = 0.f;
  vx_mma(d, a, b, kind);
}
inline unsigned short emu_fma(unsigned short a, unsigned short b, unsigned short c, __half) {
  __half_raw in[3] = {{a}, {b}, {c}};
  double sum = (double)__half2float(in[0]) * __half2float(in[1]) + __half2float(in[2]);
  return __half_raw(__double2half(sum)).x;
}
inline unsigned short emu_fma(unsigned short a, unsigned short b, unsigned short c, __nv_bfloat16) {
  float in[3] = {__int_as_float(a << 16), __int_as_float(b << 16), __int_as_float(c << 16)};
  return __nv_bfloat16_raw(__double2bfloat16((double)in[0] * in[1] + in[2])).x;
}
template <class T> unsigned vx_fma2(unsigned a, unsigned b, unsigned c, T kind) {
  unsigned low = emu_fma((unsigned short)a, (unsigned short)b, (unsigned short)c, kind);
  unsigned high = emu_fma(a >> 16, b >> 16, c >> 16, kind);
  return low | high << 16;
}
inline void vx_wait_for_predecessor() { emu::checker_wait(); }
inline unsigned vx_permute(unsigned a, unsigned b, unsigned selector) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    unsigned byte = bytes >> 8 * (selector >> 4 * i & 7) & 255;
    if (selector >> 4 * i & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}
EMU_RAW inline void emu_ldmatrix(unsigned (&r)[4], const void* row, bool transposed) {
  emu::check(row, 16, 16, false, false);
  const emu::Slot* slots = emu::exchange(0xffffffffu, &row, sizeof row, emu::LDMATRIX);
  int g = emu::lane >> 2, t = 2 * (emu::lane & 3);
  for (int m = 0; m < 4; m++) {
    unsigned half[2];
    for (int i = 0; i < 2; i++) {
      const unsigned short* p;
      memcpy(&p, slots[8 * m + (transposed ? t + i : g)], sizeof p);
      half[i] = p[transposed ? g : t + i];
    }
    r[m] = half[0] | half[1] << 16;
  }
}
inline void vx_ldmatrix_x4(unsigned (&r)[4], const void* row) { emu_ldmatrix(r, row, false); }
inline void vx_ldmatrix_x4_trans(unsigned (&r)[4], const void* row) { emu_ldmatrix(r, row, true); }
inline void vx_cp_async16(void* to, const void* from, int bytes) { emu::cp_async(to, from, 16, bytes); }
inline void vx_cp_commit() { emu::cp_commit(); }
template <int N> void vx_cp_wait() { emu::cp_wait(N); }
inline uint4 vx_load_once(const void* p) { return *reinterpret_cast<const uint4*>(p); }
inline int vx_dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; i++) sum += (signed char)(a >> 8 * i) * (signed char)(b >> 8 * i);
  return sum;
}
inline void vx_store_release(unsigned* p, unsigned v) { emu::store_release(p, v); }
inline unsigned vx_load_acquire(const unsigned* p) { return emu::load_acquire(p); }
