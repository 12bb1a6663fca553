// Rows of GGUF blocks -> elem, for products with many tokens and for embeddings.
//
// Layout: blocks (rows, K / values of a block) as in the file; y (rows, K) of elem; ids (rows) picks
//         the rows, null: row i is row i.
// Grid:   (rows, ceil(K / 32 / 256)), 256 threads, one run of 32 values each.
// Floor:  bytes: blocks once in, elem once out.
#include "gguf_blocks.h"
#include "vx.h"

extern "C" __global__ void __launch_bounds__(256)
gguf_dequantize(const u8* __restrict__ blocks, const int* __restrict__ ids, elem* __restrict__ y,
                int k) {
  int i = blockIdx.y * 256 + threadIdx.x, runs = k / RUN;
  if (i >= runs) return;
  size_t row_bytes = (size_t)(runs / RUNS_A_BLOCK) * BLOCK_BYTES;
  Run run;
  unpack(run, blocks + (ids ? ids[blockIdx.x] : blockIdx.x) * row_bytes, i);
  elem* out = y + (size_t)blockIdx.x * k + i * RUN;
#pragma unroll
  for (int part = 0; part < RUN / 8; part++) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      int at = part * 8 + j;
      i8 code = (i8)(run.codes[at / 4] >> at % 4 * 8);
      v[j] = __fsub_rn(__fmul_rn(run.scale[at / 16], (float)code), run.low[at / 16]);
    }
    store(out + part * 8, v);
  }
}
VX_EXPORT(gguf_dequantize)
