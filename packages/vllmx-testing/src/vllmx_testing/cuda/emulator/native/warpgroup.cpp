// Products of a warpgroup that run by themselves: what wgmma reads, when, and what it then writes.
//
// The hardware reads and writes at some time between issue and wait. The orders forward and random
// multiply at the wait, so that a missing wait shows; reverse multiplies at once, so that shared
// memory that comes too late shows. The check build tracks every byte in between besides.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "device.h"
#include "hopper.h"
#include "state.h"

namespace emu {
typedef WarpgroupCall Call;
static const int THREADS = 128, ROWS = 64, DEPTH = 16;
static const unsigned WINDOW_BEGIN = 1024;  // the hardware keeps the first bytes for itself

unsigned shared_address(const void* p) {
  if ((size_t)p & 15) fail("a matrix descriptor of %p, which is not 16-byte aligned", p);
  return (unsigned)((const unsigned char*)p - dynamic_shared) + WINDOW_BEGIN;
}

void fence_async() { current->async_fences.push_back(current->block_epoch); }

// A matrix descriptor: bits 0-13 start, 16-29 "leading dimension" and 32-45 "stride dimension" byte
// offset, all in units of 16 bytes; 49-51 base offset, 62-63 swizzle.
struct Descriptor {
  unsigned start, leading, stride;
};
static Descriptor decode(uint64_t bits, const char* operand) {
  unsigned swizzle = bits >> 62, base = bits >> 49 & 7;
  if (swizzle != 1) fail("wgmma: %s has swizzle mode %u, the emulator knows 1, 128 bytes", operand, swizzle);
  if (base) fail("wgmma: %s has base offset %u, the emulator knows 0", operand, base);
  if (bits & 0x38)
    fail("wgmma: %s is misaligned, it begins %u bytes behind a multiple of 1024", operand,
         (unsigned)(bits & 0x38) << 4);
  Descriptor d = {(unsigned)(bits & 0x3fff) << 4, (unsigned)(bits >> 16 & 0x3fff) << 4,
                  (unsigned)(bits >> 32 & 0x3fff) << 4};
  return d;
}

// 16 contiguous bytes of a canonical layout of 128-byte rows; the bits of the address that number
// the row, 7 to 9, are added modulo 2 to those that number the unit, 4 to 6.
static const unsigned short* unit_at(unsigned address) {
  address ^= address >> 3 & 0x70;
  return (const unsigned short*)(dynamic_shared + (int)(address - WINDOW_BEGIN));
}
// Where the contiguous dimension is K (`line`: of M or N; 16 elements are two units): groups of 8
// lines are `stride` apart. Where it is N (`line`: of K), `at` counts units along N: 64 elements
// and the next 64 are `leading` apart, 8 lines and the next 8 `stride`.
static const unsigned short* unit_of(const Descriptor& d, bool along_k, int line, int at) {
  unsigned chunk = along_k ? 0 : at / 8 * d.leading, unit = along_k ? at : at % 8;
  return unit_at(d.start + line / 8 * d.stride + line % 8 * 128 + chunk + unit * 16);
}

// All units that a product reads of shared memory
template <class F> static void for_units(const Call& call, F visit) {
  if (!call.from_registers) {
    Descriptor a = decode(call.a, "A");
    for (int row = 0; row < ROWS; row++)
      for (int at = 0; at < DEPTH / 8; at++) visit(true, row, at, unit_of(a, true, row, at));
  }
  Descriptor b = decode(call.b, "B");
  bool along_k = !call.from_registers;
  int lines = along_k ? call.columns : DEPTH, units = (along_k ? DEPTH : call.columns) / 8;
  for (int line = 0; line < lines; line++)
    for (int at = 0; at < units; at++) visit(false, line, at, unit_of(b, along_k, line, at));
}

static float value_of(unsigned short bits, bool bf16) {
  if (bf16) return __int_as_float((int)((unsigned)bits << 16));
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}

static void carry_out(const Product& product) {
  static float a[ROWS][DEPTH], b[DEPTH][256], d[ROWS][256];
  const Call& call = product.call;
  bool along_k = !call.from_registers;
  for_units(call, [&](bool is_a, int line, int at, const unsigned short* unit) {
    for (int i = 0; i < 8; i++) {
      float value = value_of(unit[i], call.is_bf16);
      if (is_a) {
        a[line][8 * at + i] = value;
      } else if (along_k) {
        b[8 * at + i][line] = value;
      } else {
        b[line][8 * at + i] = value;
      }
    }
  });
  for (int t = 0; t < THREADS && call.from_registers; t++)
    for (int i = 0; i < 8; i++) {  // as of mma.m16n8k16, a warp below the other
      int row = 16 * (t / 32) + t % 32 / 4 + i / 2 % 2 * 8, column = t % 4 * 2 + i % 2 + i / 4 * 8;
      unsigned pair = product.fragments[t][i / 2];
      a[row][column] = value_of((unsigned short)(pair >> 16 * (i % 2)), call.is_bf16);
    }
  for (int row = 0; row < ROWS; row++) {
    for (int n = 0; n < call.columns; n++) d[row][n] = 0.f;
    for (int k = 0; k < DEPTH; k++)
      for (int n = 0; n < call.columns; n++) d[row][n] += a[row][k] * b[k][n];
  }
  for (int t = 0; t < THREADS; t++)
    for (int i = 0; i < call.columns / 2; i++) {
      int row = 16 * (t / 32) + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
      float* sum = product.sums[t] + i;
      *sum = d[row][column] + (call.add ? *sum : 0.f);
    }
}

static void issue(Warpgroup& group, int first) {
  const Product& product = group.open;
  if (!group.fenced) fail("wgmma: no wgmma.fence since registers may have been touched");
  for_units(product.call, [](bool, int, int, const unsigned short* unit) {
    checker_async_read(unit, 16, true);
  });
  for (int t = 0; t < THREADS; t++)
    checker_registers(fibers[first + t], product.sums[t], product.call.columns * 2,
                      product.fragments[t], true);
  if (order == REVERSE) carry_out(product);
  group.groups.back().push_back(product);
}

static void finish(Warpgroup& group, int first, int keep) {
  while ((int)group.groups.size() - 1 > keep) {
    for (const Product& product : group.groups.front()) {
      if (order != REVERSE) carry_out(product);
      for_units(product.call, [](bool, int, int, const unsigned short* unit) {
        checker_async_read(unit, 16, false);
      });
      for (int t = 0; t < THREADS; t++)
        checker_registers(fibers[first + t], product.sums[t], product.call.columns * 2,
                          product.fragments[t], false);
    }
    group.groups.erase(group.groups.begin());
  }
  group.fenced = false;
}

static bool same(const Call& a, const Call& b) {
  return a.step == b.step && a.columns == b.columns && a.is_bf16 == b.is_bf16 &&
         a.from_registers == b.from_registers && a.add == b.add && a.keep == b.keep && a.a == b.a &&
         a.b == b.b;
}

void warpgroup(const Call& call, float* sums, const unsigned* fragment) {
  static const char* const NAMES[] = {"wgmma.fence", "wgmma", "wgmma.commit_group",
                                      "wgmma.wait_group"};
  int index = current->id / THREADS, first = index * THREADS, thread = current->id - first;
  Warpgroup& group = warpgroups[index];
  for (int warp = 0; warp < 4; warp++)
    if (first / 32 + warp >= (int)warps.size() || ~warps[first / 32 + warp].live)
      fail("%s: not all threads of the warpgroup are there", NAMES[call.step]);
  if (!group.arrived) {
    group.open.call = call;
  } else if (!same(group.open.call, call)) {
    fail("threads of one warpgroup met in different operations or operands: %s and %s",
         NAMES[group.open.call.step], NAMES[call.step]);
  }
  group.open.sums[thread] = sums, group.open.fragments[thread] = fragment;
  unsigned generation = group.generation;
  if (++group.arrived < THREADS)
    return wait_for(&group.generation, generation, NAMES[call.step], __builtin_return_address(0));
  switch (call.step) {  // the last to arrive does the common work
    case Call::FENCE: group.fenced = true; break;
    case Call::MULTIPLY: issue(group, first); break;
    case Call::COMMIT: group.groups.emplace_back(); break;
    case Call::WAIT: finish(group, first, call.keep); break;
  }
  group.arrived = 0, group.generation++;
}

void prepare_warpgroups(int num_threads) {
  warpgroups.assign((num_threads + THREADS - 1) / THREADS, Warpgroup());
  for (Warpgroup& group : warpgroups) group.groups.emplace_back();
}
void check_warpgroups() {
  for (Warpgroup& group : warpgroups)
    if (group.groups.size() != 1 || !group.groups[0].empty())
      fail("the block ended with wgmma that nobody waited for");
}
}  // namespace emu
