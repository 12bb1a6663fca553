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
  fibers = std::vector<Fiber>(threads);
  for (Fiber& fiber : fibers) {
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
inline float simd_sum(float value) {
  const uint first = shim::current & ~(shim::LANES - 1);
  shim::fibers[shim::current].offered = value;
  shim::park(shim::IN_SIMDGROUP);
  float sum = 0;
  for (uint i = 0; i < shim::LANES; i++) sum += shim::fibers[first + i].offered;
  shim::park(shim::IN_SIMDGROUP);
  return sum;
}
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { shim::park(shim::AT_BARRIER); }
}  // namespace metal
