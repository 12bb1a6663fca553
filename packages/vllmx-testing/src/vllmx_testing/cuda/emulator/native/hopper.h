// Twins of vx_hopper.h, included by it alone.
#pragma once
#include "device.h"

namespace emu {
// What the threads of a warpgroup do together; all must agree in all of it
struct WarpgroupCall {
  enum Step { FENCE, MULTIPLY, COMMIT, WAIT } step;
  int columns;  // N of a product
  bool is_bf16, from_registers, add;
  int keep;  // of a wait
  uint64_t a, b;
};
// `sums` and `fragment` of this thread; they are the product's until a wait
void warpgroup(const WarpgroupCall& call, float* sums = nullptr, const unsigned* fragment = nullptr);
void fence_async();
unsigned shared_address(const void* p);
}  // namespace emu

inline unsigned vx_shared_address(const void* p) { return emu::shared_address(p); }
inline void vx_fence_async() { emu::fence_async(); }
inline void vx_wgmma_fence() { emu::warpgroup({emu::WarpgroupCall::FENCE}); }
inline void vx_wgmma_commit() { emu::warpgroup({emu::WarpgroupCall::COMMIT}); }
template <int N> void vx_wgmma_wait() {
  emu::WarpgroupCall call = {emu::WarpgroupCall::WAIT};
  call.keep = N;
  emu::warpgroup(call);
}
template <int N> void vx_wgmma_pin(float (&)[N]) {}
inline float vx_exp2(float x) { return exp2f(x); }

inline bool emu_is_bf16(__nv_bfloat16) { return true; }
inline bool emu_is_bf16(__half) { return false; }
template <int SUMS, class T>
void vx_wgmma(float (&d)[SUMS], uint64_t a, uint64_t b, bool add, T kind) {
  emu::warpgroup({emu::WarpgroupCall::MULTIPLY, 2 * SUMS, emu_is_bf16(kind), false, add, 0, a, b}, d);
}
template <int SUMS, class T>
void vx_wgmma(float (&d)[SUMS], const unsigned (&a)[4], uint64_t b, bool add, T kind) {
  emu::warpgroup({emu::WarpgroupCall::MULTIPLY, 2 * SUMS, emu_is_bf16(kind), true, add, 0, 0, b}, d,
                 a);
}
