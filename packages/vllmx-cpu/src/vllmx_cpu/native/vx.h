// The contract between the kernels, the thread team and the tape.
//
// Every op is one function that all threads of the team call with the same arguments; `ctx->tid` of
// `ctx->nth` says which share to take. The tape puts a barrier after each op; an op with phases of its
// own calls vx_barrier between them. Arguments are plain structs whose pointers are fixed when the
// step is recorded (buffers are sized for the largest step); only VxStep changes from step to step.
//
// Each kernel source is compiled once per instruction set with VX_ISA set to a name (portable, avx2,
// avx512, avx512bf16, amx, neon, dotprod); all of its symbols live in namespace vx::VX_ISA. VX_OP exports an op
// by name for Python, which looks it up where it lowers a step: there is no list of ops.
//
// For the authors of kernels: `simd.h` has the vectors (F32x16, exp, dot_bf16, 16-bit loads and
// stores); every src/vllmx_cpu/native/*.cpp whose first line is `// VX: per instruction set` is
// compiled once for each, the others once. All of an op's state lies in its args, in `ctx->scratch`
// (2 MiB) or in buffers that the backend allocates and passes in; kernels never allocate.
#pragma once
#include <cstddef>
#include <cstdint>

#ifndef VX_ISA
#define VX_ISA portable
#endif

// On functions that Python calls (inside extern "C"); everything else stays hidden.
#define VX_EXPORT __attribute__((visibility("default")))

enum VxDType : int32_t { VX_F32 = 0, VX_F16 = 1, VX_BF16 = 2 };
// Of KV pages, beside VxDType.
enum VxKVCode : int32_t { VX_KV_INT8 = 3, VX_KV_FP8 = 4, VX_KV_Q4 = 5, VX_KV_INT8_Q4 = 6 };

// One step: vllmx_core.plan.StepPlan, with tokens already resolved (no negative references).
struct VxStep {
  int32_t T, R, L, B;
  int32_t block_stride;          // int32 entries from one row of a block table to the next
  const int32_t* tokens;         // (T)
  const int32_t* positions;      // (T)
  const int32_t* slots;          // (G, T)  block * P + offset, for each cache group
  const int32_t* query_start;    // (R + 1)
  const int32_t* context_len;    // (R)
  const int32_t* block_tables;   // (G, R, B)
  const int32_t* logit_rows;     // (L)
  const int32_t* token_types;    // (T), or null: all 0
  const int32_t* state_from;     // (R) slot of the states, -1: zeros; null without recurrent layers
  const int32_t* state_to;       // (R) slot in which they are left
  const int32_t* state_after;    // (T) slot that keeps those after this token too, -1: none; or null
  const int32_t* adapters;       // (T) slot of the adapter of each token's row, -1: none; null: no row has any
};

struct VxTeam;
struct VxCtx {
  int32_t tid, nth;
  VxTeam* team;
  uint8_t* scratch;              // 64-byte aligned, this thread's own
  size_t scratch_bytes;
};

void vx_barrier(VxCtx* ctx);     // spins briefly, then sleeps

// Dynamic shares: the next index 0, 1, 2 ... of a counter that all threads of the team draw from. Every
// barrier (those that the tape puts after each op too) sets it back to 0, so one phase is
//     for (int32_t i; (i = vx_next(ctx)) < count;) work(i);
// Prefer it to a static split by tid: a thread that loses its core then holds up one piece of work,
// not half of the op. Results must not depend on who computed what.
int32_t vx_next(VxCtx* ctx);

typedef void (*VxOp)(const void* args, const VxStep* step, VxCtx* ctx);

// Behind an op's function, inside vx::VX_ISA: exports vx_op_<isa>_<name>() and the size of its arguments,
// vx_op_<isa>_<name>_bytes(), which native.py compares with its mirror of the struct.
#define VX_OP(name, Args) VX_OP_OF(VX_ISA, name, Args)
#define VX_OP_OF(isa, name, Args) VX_OP_SYMBOLS(isa, name, Args)
#define VX_OP_SYMBOLS(isa, name, Args)                                                      \
  extern "C" VX_EXPORT void vx_op_##isa##_##name(const void* args, const VxStep* step, VxCtx* ctx) { \
    name(args, step, ctx);                                                                  \
  }                                                                                         \
  extern "C" VX_EXPORT size_t vx_op_##isa##_##name##_bytes() { return sizeof(Args); }

// Attention of one layer: optional per-head q/k RMS norm, RoPE, K/V write, paged attention.
struct VxAttention {
  const float* qkv;              // (T, (H + 2K) * D)
  void* out;                     // (T, H * D), dtype out_dtype
  int32_t out_dtype;
  int32_t num_heads, num_kv_heads, head_size, rotary_dim, interleaved;
  int32_t block_size;            // P tokens in a page
  int32_t kv_dtype;              // VxDType or VxKVCode of the pages
  int32_t window;                // 0 = all; below 0: the chunk of so many positions
  int32_t causal;
  float scale, softcap, norm_eps; // softcap 0 = none
  const float* rope;             // (positions, rotary_dim) cos | sin, or null
  const float* q_norm;           // (D) or null
  const float* k_norm;           // (D) or null
  const float* sinks;            // (H) or null
  void* k_pages;                 // layout and sizes: attention.h
  void* v_pages;
  void* workspace;               // shared by the team, 64-byte aligned, free between ops; may be null
  size_t workspace_bytes;        // vx_attention_workspace_bytes; less only costs parallelism
  int32_t group;                 // which of the step's block tables lists the pages
  int32_t shared;                // 1: q alone, (T, H * D), over pages that an earlier layer wrote
  const int32_t* rope_rows;      // (T) rows of `rope`, or null: the positions
  const float* bias;             // see VxSegmentAttention
  int32_t bias_length;
};
