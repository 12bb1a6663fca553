// Which instruction sets were compiled in, and which of them this processor runs.
#include "attention.h"
#include "encode.h"
#include "ops.h"
#include "sampler.h"
#include "team.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

const char* const names[] = {  // from the least to the most capable
#define VX_X(name) #name,
    VX_ISA_LIST
#undef VX_X
};

struct Size {
  const char* name;
  size_t bytes;
};

bool same(const char* a, const char* b) { return __builtin_strcmp(a, b) == 0; }

#if defined(__x86_64__)
enum Register { EAX, EBX, ECX, EDX };

// Whether a leaf of CPUID has all of these bits in a register.
bool has(unsigned leaf, unsigned subleaf, Register where, unsigned bits) {
  unsigned found[4] = {0, 0, 0, 0};
  if (!__get_cpuid_count(leaf, subleaf, &found[EAX], &found[EBX], &found[ECX], &found[EDX])) return false;
  return (found[where] & bits) == bits;
}

// Whether the system keeps these registers of a thread: bits of XCR0.
bool keeps(unsigned bits) {
  enum { OSXSAVE = 1 << 27 };
  if (!has(1, 0, ECX, OSXSAVE)) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & bits) == bits;
}

// Tiles need the processor, and the system's permission to keep their state: Linux gives it to a
// process that asks, for good.
bool tiles_permitted() {
#if defined(__linux__)
  enum { BF16 = 1 << 22, TILE = 1 << 24, INT8 = 1 << 25, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  if (!has(7, 0, EDX, BF16 | TILE | INT8)) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

bool supported(const char* name) {
#if defined(__x86_64__)
  // Not __builtin_cpu_supports: Zig's runtime knows no processor.
  enum : unsigned { FMA = 1u << 12, AVX = 1u << 28, F16C = 1u << 29 };                             // leaf 1, ECX
  enum : unsigned { AVX2 = 1u << 5, BMI2 = 1u << 8, F = 1u << 16, DQ = 1u << 17, BW = 1u << 30, VL = 1u << 31 };
  enum : unsigned { VBMI = 1u << 1, VNNI = 1u << 11, BF16 = 1u << 5 };  // leaf 7: ECX, ECX; its second part: EAX
#if defined(__APPLE__)  // macOS keeps them too, but sets their bits at a thread's first AVX-512 instruction only
  enum : unsigned { YMM = 0x6, ZMM = YMM };
#else
  enum : unsigned { YMM = 0x6, ZMM = 0xe6 };
#endif
  const bool avx2 = has(1, 0, ECX, FMA | AVX | F16C) && has(7, 0, EBX, AVX2 | BMI2) && keeps(YMM);
  const bool avx512 = avx2 && has(7, 0, EBX, F | DQ | BW | VL) && keeps(ZMM);
  if (same(name, "avx2")) return avx2;
  if (same(name, "avx512")) return avx512;
  if (same(name, "avx512bf16") || same(name, "amx")) {
    const bool vectors = avx512 && has(7, 1, EAX, BF16) && has(7, 0, ECX, VNNI);
    return vectors && (same(name, "avx512bf16") || (has(7, 0, ECX, VBMI) && tiles_permitted()));
  }
#elif defined(__aarch64__) && defined(__linux__)
  enum { ASIMDDP = 1 << 20 };  // of Linux's AT_HWCAP
  if (same(name, "dotprod")) return (getauxval(AT_HWCAP) & ASIMDDP) != 0;
#endif
  (void)name;
  return true;  // the baseline; on Apple's processors the dot product too
}

}  // namespace

// The i-th instruction set that was compiled in, from the least capable; null beyond the last.
VX_API const char* vx_isa_name(int32_t i) {
  return i >= 0 && i < (int32_t)(sizeof names / sizeof *names) ? names[i] : nullptr;
}
// 1 when this processor can run it.
VX_API int32_t vx_isa_supported(int32_t i) { return vx_isa_name(i) && supported(names[i]); }
// "vllmx-cpu-sources:<hash>", found in the file by build.py before the library is loaded.
VX_API const char* vx_source_marker() { return VX_SOURCE_MARKER; }
VX_API const char* vx_compiler() { return VX_COMPILER; }

// sizeof of a struct that Python mirrors, by its name; 0 for another. Those of ops: VX_OP in vx.h.
VX_API size_t vx_struct_bytes(const char* name) {
#define VX_SIZE(Struct) {#Struct, sizeof(Struct)}
  const Size sizes[] = {VX_SIZE(VxStep), VX_SIZE(VxRecord), VX_SIZE(VxJob), VX_SIZE(VxWeight), VX_SIZE(VxEncode)};
#undef VX_SIZE
  for (const Size& size : sizes)
    if (same(size.name, name)) return size.bytes;
  return 0;
}
