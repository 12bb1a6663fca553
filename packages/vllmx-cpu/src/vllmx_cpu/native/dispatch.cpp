// Picks the instruction set at run time and hands its ops to Python by number.
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

#define VX_X(name) \
  namespace vx { namespace name { const VxKernels* kernels(); } }
VX_ISA_LIST
#undef VX_X

namespace {

struct Variant {
  const char* name;
  const VxKernels* (*kernels)();
};

const Variant variants[] = {  // from the least to the most capable
#define VX_X(name) {#name, vx::name::kernels},
    VX_ISA_LIST
#undef VX_X
};

bool same(const char* a, const char* b) { return __builtin_strcmp(a, b) == 0; }

#if defined(__x86_64__)
// Tiles need the processor, and the system's permission to keep their state: Linux gives it to a
// process that asks, for good.
bool tiles_permitted() {
#if defined(__linux__)
  enum { BF16 = 1 << 22, TILE = 1 << 24, INT8 = 1 << 25, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & (BF16 | TILE | INT8)) != (BF16 | TILE | INT8)) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

bool supported(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (same(name, "avx2")) return avx2;
  if (same(name, "avx512")) return avx512;
  if (same(name, "avx512bf16") || same(name, "amx")) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool bf16 = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
    const bool vectors = avx512 && bf16 && __builtin_cpu_supports("avx512vnni");
    const bool bytes = __builtin_cpu_supports("avx512vbmi");
    return vectors && (same(name, "avx512bf16") || (bytes && tiles_permitted()));
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
  return i >= 0 && i < (int32_t)(sizeof variants / sizeof *variants) ? variants[i].name : nullptr;
}
// 1 when this processor can run it.
VX_API int32_t vx_isa_supported(int32_t i) { return vx_isa_name(i) && supported(variants[i].name); }
VX_API const VxKernels* vx_kernels(int32_t i) { return variants[i].kernels(); }
// "vllmx-cpu-sources:<hash>", found in the file by build.py before the library is loaded.
VX_API const char* vx_source_marker() { return VX_SOURCE_MARKER; }
VX_API const char* vx_compiler() { return VX_COMPILER; }

// sizeof of the structs that Python mirrors, in the order of structs.py; 0 beyond the last.
VX_API size_t vx_struct_bytes(int32_t i) {
  const size_t bytes[] = {sizeof(VxStep),      sizeof(VxRecord), sizeof(VxJob),
                          sizeof(VxWeight),    sizeof(VxLinear), sizeof(VxEmbedding),
                          sizeof(VxNorm),      sizeof(VxElementwise), sizeof(VxAttention),
                          sizeof(VxSampler),   sizeof(VxKernels), sizeof(VxEncode)};
  return i >= 0 && i < (int32_t)(sizeof bytes / sizeof *bytes) ? bytes[i] : 0;
}
