// y = x w^T + bias for up to 16 tokens at a time, on tensor cores; the weights are read once. With VX_GATED
// y = act(gate) * up: w (2N, K), the rows of the gate first, VX_ROWS 2 and one split.
//
// Layout: x (M, K), w (N, K) of elem, bf16 or f16; bias (N) of f32 or null; y of elem, or of f32 with VX_OUT 1,
//         (M, N) with rows `pitch` apart. K is a multiple of 32. Sums in f32. residual, squares: see Added; norm,
//         with VX_NORM 1: see input_norm.h.
// Grid:   (ceil(N / (8 * VX_ROWS)), ceil(M / (8 * VX_TILES)), splits: a power of two),
//         256 threads. K is cut to 8 * splits pieces,
//         one a warp, whose sums are added in an order that neither M nor the options change: a token has the
//         same bits in every batch. partial, arrivals: see store_parts. Rows of w are the columns of fragment B,
//         so that a block may have only 8 of them: with few outputs there is still one for each processor. The
//         order of K inside a product is free as long as both sides agree: a lane takes 8 neighbours with one
//         16-byte copy, and feeds two products, which have sums of their own to wait half as long for each other.
// Floor:  bytes of w, once for each tile of tokens. Each warp copies a ring of 8 units (VX_ROWS 2: 4) by cp.async,
//         28 KB a block under way at all times (24 KB).
#include "mma_rows.h"

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
linear_mma(const elem* x, const elem* __restrict__ w, const float* __restrict__ bias, out_elem* y, float* partial,
           u32* arrivals, int m, int n, int k, int pitch, const elem* residual, float* squares,
           const float* __restrict__ norm, const float* norm_squares, int num_squares, float eps) {
  __shared__ uint4 ring[RING];
  __shared__ float part[WARPS * TOKENS * (ROWS + PADDING)];
  __shared__ float scales[TOKENS];
  __shared__ int arrived;
  multiply_tile(x, OwnRow{k}, w, bias, y, partial, arrivals, {residual, squares},
                {norm, norm_squares, num_squares, eps}, ring, part, scales, &arrived, blockIdx.y * TOKENS, m, n, k, pitch);
}
VX_EXPORT(linear_mma)
