// Runs the body of a Metal kernel on a CPU: one fiber for each thread of a threadgroup, threadgroups
// one after the other. It checks indices, masks, reductions and where barriers stand; it knows
// nothing of Metal's address spaces, of races, registers, fast math or speed.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 float16_t;
struct bfloat16_t {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};
struct uint3 {
  uint x, y, z;
};
struct ulong2 {
  ulong x, y;
  ulong2(ulong a, ulong b) : x(a), y(b) {}
};
#define threadgroup static  // shared by the fibers of a group, and groups follow each other

namespace shim {
constexpr uint LANES = 32;
enum Wait { NOT, IN_SIMDGROUP, AT_BARRIER };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 17);
  bool done = false;
  Wait wait = NOT;
  float offered = 0;
};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline uint current = 0;
inline std::function<void(uint)> body;
inline long divergences = 0;  // threads of a group that did not reach the same barrier

inline void park(Wait why) {
  fibers[current].wait = why;
  swapcontext(&fibers[current].context, &scheduler);
}
inline void enter() {
  body(current);
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}
inline void resume(uint index) {
  current = index;
  fibers[index].wait = NOT;
  swapcontext(&scheduler, &fibers[index].context);
}

// Until every lane waits at the barrier or is done.
inline void advance_simdgroup(uint first) {
  for (;;) {
    uint exchanging = 0, elsewhere = 0;
    for (uint i = first; i < first + LANES; i++)
      if (!fibers[i].done && fibers[i].wait != AT_BARRIER) resume(i);
    for (uint i = first; i < first + LANES; i++)
      (fibers[i].wait == IN_SIMDGROUP && !fibers[i].done ? exchanging : elsewhere)++;
    if (exchanging == 0) return;
    if (elsewhere) divergences++;
  }
}

inline void run_group(uint threads, std::function<void(uint)> thread_body) {
  body = std::move(thread_body);
  fibers.resize(threads);  // new stacks for each group would be most of the work
  for (Fiber& fiber : fibers) {
    fiber.done = false, fiber.wait = NOT, fiber.offered = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  for (;;) {
    // the last simdgroup first: what it reads of the others before a barrier is not there yet
    for (uint first = threads; first > 0; first -= LANES) advance_simdgroup(first - LANES);
    uint done = 0;
    for (Fiber& fiber : fibers) done += fiber.done;
    if (done == threads) return;
    if (done) divergences++;
    for (Fiber& fiber : fibers) fiber.wait = NOT;
  }
}
}  // namespace shim

namespace metal {
using std::exp;
using std::exp2;
using std::tanh;
inline float max(float a, float b) { return std::fmax(a, b); }
inline uint min(uint a, uint b) { return a < b ? a : b; }
template <typename Join>
float simd_reduce(float value, Join join) {
  const uint first = shim::current & ~(shim::LANES - 1);
  shim::fibers[shim::current].offered = value;
  shim::park(shim::IN_SIMDGROUP);
  float all = shim::fibers[first].offered;
  for (uint i = 1; i < shim::LANES; i++) all = join(all, shim::fibers[first + i].offered);
  shim::park(shim::IN_SIMDGROUP);
  return all;
}
inline float simd_sum(float value) {
  return simd_reduce(value, [](float a, float b) { return a + b; });
}
inline float simd_max(float value) {
  return simd_reduce(value, [](float a, float b) { return max(a, b); });
}
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { shim::park(shim::AT_BARRIER); }
inline void simdgroup_barrier(mem_flags) { shim::park(shim::IN_SIMDGROUP); }

// Every lane holds the whole matrix and computes all of it. The last lane alone stores, so that who
// reads before a barrier finds what was there.
template <typename T, int COLS, int ROWS>
struct simdgroup_matrix {
  T at[ROWS][COLS];
};
template <typename T, int COLS, int ROWS>
simdgroup_matrix<T, COLS, ROWS> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, COLS, ROWS> m;
  for (auto& row : m.at)
    for (T& place : row) place = value;
  return m;
}
template <typename T>
void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* from, ulong width = 8,
                    ulong2 origin = ulong2(0, 0), bool turned = false) {
  from += origin.y * width + origin.x;
  for (int r = 0; r < 8; r++)
    for (int c = 0; c < 8; c++) m.at[r][c] = turned ? from[c * width + r] : from[r * width + c];
}
template <typename T>
void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* to, ulong width = 8) {
  if (shim::current % shim::LANES != shim::LANES - 1) return;
  for (int r = 0; r < 8; r++)
    for (int c = 0; c < 8; c++) to[r * width + c] = m.at[r][c];
}
template <typename T>
void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& d, const simdgroup_matrix<T, 8, 8>& a,
                                   const simdgroup_matrix<T, 8, 8>& b,
                                   const simdgroup_matrix<T, 8, 8>& c) {
  simdgroup_matrix<T, 8, 8> sum = c;  // d may be any of the others
  for (int r = 0; r < 8; r++)
    for (int i = 0; i < 8; i++)
      for (int k = 0; k < 8; k++) sum.at[r][k] += a.at[r][i] * b.at[i][k];
  d = sum;
}
template <typename T>
void simdgroup_multiply(simdgroup_matrix<T, 8, 8>& d, const simdgroup_matrix<T, 8, 8>& a,
                        const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<T, 8, 8>(T(0)));
}
}  // namespace metal
