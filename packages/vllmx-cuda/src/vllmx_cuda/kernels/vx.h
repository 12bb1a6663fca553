// The one header that every kernel includes. Under nvcc and NVRTC it is a thin layer over CUDA C++
// and PTX; under a host compiler the same names run on the emulator (../emulator/native/device.h).
//
// Rules for kernels:
// - include nothing but vx.h and headers of this folder;
// - PTX only here, inside a wrapper that has an emulated twin;
// - `VX_EXPORT(entry)` after each `extern "C" __global__` entry;
// - declare __shared__ arrays in the entry itself and pass them on: g++ drops the section
//   attribute inside templates, and the emulator would lose sight of them;
// - dynamic shared memory through VX_DYNAMIC_SHARED(name);
// - no __activemask, no waiting for another block of the launch; for those of other GPUs by vx_load_acquire alone.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define VX_F32 0
#define VX_F16 1
#define VX_BF16 2
#ifndef VX_DTYPE
#define VX_DTYPE VX_BF16
#endif
#ifndef VX_VEC
#define VX_VEC 8
#endif

typedef __nv_bfloat16 bf16;
typedef __half f16;
typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#if VX_DTYPE == VX_BF16
typedef bf16 elem;  // what activations and dense weights are made of
#elif VX_DTYPE == VX_F16
typedef f16 elem;
#else
typedef float elem;
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define VX_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define VX_EXPORT(entry)
#define VX_DEV __device__ __forceinline__
#include "vx_ptx.h"
#else
#include "device.h"
#endif

#define VX_ALL 0xffffffffu
#define VX_INFINITY __int_as_float(0x7f800000)

// ---- elements to and from float

VX_DEV float to_float(float v) { return v; }
VX_DEV float to_float(f16 v) { return __half2float(v); }
VX_DEV float to_float(bf16 v) { return __bfloat162float(v); }

template <class T> struct Rounded;
template <> struct Rounded<float> {
  static VX_DEV float of(float v) { return v; }
};
template <> struct Rounded<f16> {
  static VX_DEV f16 of(float v) { return __float2half_rn(v); }
};
template <> struct Rounded<bf16> {
  static VX_DEV bf16 of(float v) { return __float2bfloat16_rn(v); }
};
template <class T> VX_DEV T from_float(float v) { return Rounded<T>::of(v); }

// N elements that move with as few instructions as their size allows (16 bytes at most in one).
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};

template <int BYTES> struct Word;
template <> struct Word<1> { typedef u8 type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

// Copies a pack by words of up to 16 bytes: written out, because compilers split struct copies.
template <class T, int N> VX_DEV Pack<T, N> load_pack(const T* p) {
  constexpr int bytes = sizeof(T) * N, step = bytes < 16 ? bytes : 16;
  typedef typename Word<step>::type W;
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < bytes / step; i++)
    reinterpret_cast<W*>(&pack)[i] = reinterpret_cast<const W*>(p)[i];
  return pack;
}
template <class T, int N> VX_DEV void store_pack(T* p, const Pack<T, N>& pack) {
  constexpr int bytes = sizeof(T) * N, step = bytes < 16 ? bytes : 16;
  typedef typename Word<step>::type W;
#pragma unroll
  for (int i = 0; i < bytes / step; i++)
    reinterpret_cast<W*>(p)[i] = reinterpret_cast<const W*>(&pack)[i];
}

template <int N, class T> VX_DEV void load(float (&v)[N], const T* p) {
  Pack<T, N> pack = load_pack<T, N>(p);
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = to_float(pack.at[i]);
}
template <int N, class T> VX_DEV void store(T* p, const float (&v)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; i++) pack.at[i] = from_float<T>(v[i]);
  store_pack(p, pack);
}

// ---- reductions: a fixed tree, so that a row's bits do not depend on anything but the block size

VX_DEV float warp_sum(float v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) v += __shfl_xor_sync(VX_ALL, v, lanes);
  return v;
}
VX_DEV float warp_max(float v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) v = fmaxf(v, __shfl_xor_sync(VX_ALL, v, lanes));
  return v;
}

// Sum over a block of whole warps; every thread gets it. part: 32 floats of shared memory.
VX_DEV float block_sum(float v, float* part) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  v = warp_sum(v);
  __syncthreads();  // an earlier use of part may still be read
  if (lane == 0) part[warp] = v;
  __syncthreads();
  return warp_sum(lane < warps ? part[lane] : 0.f);
}
