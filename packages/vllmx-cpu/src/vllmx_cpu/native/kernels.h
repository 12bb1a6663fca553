// The ops of this folder, as one instruction set's functions; see ops.h for their arguments.
#pragma once
#include "ops.h"

namespace vx {
namespace VX_ISA {

void linear(const void* args, const VxStep* step, VxCtx* ctx);      // VxLinear
void embedding(const void* args, const VxStep* step, VxCtx* ctx);   // VxEmbedding
void rms_norm(const void* args, const VxStep* step, VxCtx* ctx);    // VxNorm
void layer_norm(const void* args, const VxStep* step, VxCtx* ctx);  // VxNorm
void gated_act(const void* args, const VxStep* step, VxCtx* ctx);   // VxElementwise, these four
void activation(const void* args, const VxStep* step, VxCtx* ctx);
void add(const void* args, const VxStep* step, VxCtx* ctx);
void scale(const void* args, const VxStep* step, VxCtx* ctx);

}  // namespace VX_ISA
}  // namespace vx
