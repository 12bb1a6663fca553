// VX: per instruction set
// From rows of floats to the blocks of a quantised type. AVX-512 BF16 and AMX have nothing to add to
// AVX-512 here, and take its code.
#include "encode.h"

#if defined(__AVX512BF16__)

namespace vx {
namespace avx512 {
int32_t encoder(VxEncode* job);
}
namespace VX_ISA {
int32_t encoder(VxEncode* job) { return avx512::encoder(job); }
}  // namespace VX_ISA
}  // namespace vx

#else

#include "encode_bytes.h"
#include "encode_super.h"
#include "ops.h"

namespace vx {
namespace VX_ISA {
namespace encode {

// Values of `lanes` blocks into the tile, and the greatest magnitudes among them. A zero has no sign:
// which of two comes out of a minimum would depend on the instruction set.
template <int VALUES>
static Reach fill(Tile& tile, const Source& source, int lanes) {
  Reach reach = {zero(), zero()};
  for (int i = 0; i < VALUES; i += 16) {
    alignas(64) float square[16 * 16];
    for (int lane = 0; lane < 16; ++lane) {
      const F32x16 x = lane < lanes ? source.at(lane * VALUES + i) + zero() : zero();
      reach.add(x);
      store(square + lane * 16, x);
    }
    for (int k = 0; k < 16; ++k)
      for (int lane = 0; lane < 16; ++lane) tile.values[(i + k) * 16 + lane] = square[lane * 16 + k];
  }
  return reach;
}

template <int VALUES>
static void measure(VxEncode* job, const Tile& tile) {
  double error[8] = {0}, size[8] = {0};
  for (int i = 0; i < VALUES * 16; i += 8)
    for (int k = 0; k < 8; ++k) {
      const double x = tile.values[i + k], e = tile.found[i + k] - x;
      error[k] += e * e;
      size[k] += x * x;
    }
  for (int k = 0; k < 8; ++k) job->squared_error += error[k], job->squared_value += size[k];
}

template <class Type>
static int32_t encode_blocks(VxEncode* job) {
  enum { VALUES = Type::VALUES, BYTES = Type::BYTES };
  const float most = F16_MAX * Type::REACH;
  const int64_t count = job->rows * job->cols / VALUES;
  Tile tile;
  for (int64_t block = 0; block < count; block += 16) {
    const int lanes = count - block < 16 ? (int)(count - block) : 16;
    const Source source = {job->source, job->source_kind, block * VALUES};
    const Reach reach = fill<VALUES>(tile, source, lanes);
    if (!reach.finite()) return -1;
    const bool beyond = any(reach.magnitude > splat(most));
    if (beyond)
      for (int i = 0; i < VALUES; ++i)
        store(tile.values + i * 16, clip(load(tile.values + i * 16), -most, most));
    Type::run(tile, Blocks{job->out + block * BYTES, BYTES, lanes});
    if (!job->measure) continue;
    if (beyond) fill<VALUES>(tile, source, lanes);
    measure<VALUES>(job, tile);
  }
  return 0;
}

}  // namespace encode

int32_t encoder(VxEncode* job) {
  using namespace encode;
  switch (job->kind) {
    case VX_Q8_0: return encode_blocks<EncodeQ8_0>(job);
    case VX_Q4_0: return encode_blocks<EncodeQ4_0>(job);
    case VX_Q4_1: return encode_blocks<EncodeQ4_1>(job);
    case VX_Q5_0: return encode_blocks<EncodeQ5_0>(job);
    case VX_Q5_1: return encode_blocks<EncodeQ5_1>(job);
    case VX_Q2_K: return encode_blocks<EncodeQ2_K>(job);
    case VX_Q3_K: return encode_blocks<EncodeQ3_K>(job);
    case VX_Q4_K: return encode_blocks<EncodeQ4_K>(job);
    case VX_Q5_K: return encode_blocks<EncodeQ5_K>(job);
    case VX_Q6_K: return encode_blocks<EncodeQ6_K>(job);
    case VX_ROWS_INT8: return encode_rows<Int8>(job);
    case VX_ROWS_FP8: return encode_rows<Float8>(job);
  }
  return -2;
}

}  // namespace VX_ISA
}  // namespace vx

#endif
