// Hands the encoder of an instruction set to Python, by the number that dispatch.cpp gives it.
#include "encode.h"
#include "team.h"

#define VX_X(name) \
  namespace vx { namespace name { int32_t encoder(VxEncode* job); } }
VX_ISA_LIST
#undef VX_X

namespace {

const VxEncoder encoders[] = {
#define VX_X(name) vx::name::encoder,
    VX_ISA_LIST
#undef VX_X
};

}  // namespace

// Fills `out`, and what else the job says. 0; -1: a value is not finite; -2: the kind has no encoder.
VX_API int32_t vx_encode(int32_t isa, VxEncode* job) { return encoders[isa](job); }
