// w4_linear:  y = x w^T + bias for up to 64 tokens, w as in w4_codes.h, on tensor cores; the codes are read once.
//             With VX_GATED act(gate) * up, as of linear_mma; N is a multiple of 16.
// experts_w4: the same with the matrix of one of X experts for each tile of tokens (expert_tiles.h).
//
// Layout: x (M, K) of elem, bf16 or f16; w (N, K); bias (N) of f32 or null; y of elem, or of f32 with VX_OUT
//         1, (M, N) with rows `pitch` apart. K is a multiple of 32. residual, squares, norm: as of linear_mma.
//         A code minus its zero is exact in elem, so products are exact; scales meet the sums of 16, 32 or 64 products, in f32.
// Grid:   (ceil(N / (16 * VX_ROWS)), ceil(M / (8 * VX_TILES)), splits), 256 threads. K is cut to 8 * splits
//         pieces, one a warp. Each warp has a ring of tiles of its own, which cp.async fills STAGES ahead:
//         32 KB of codes under way in a block, more than latency times bandwidth of an SM; nobody waits for
//         another warp before the end. The pieces' sums are added in an order that neither M nor the grid
//         changes; across splits the last block to arrive adds them, out of `partial` (splits, M, N).
//         arrivals: one u32 for each (x, y) of the grid, 0 before and after; null with one split. Of experts:
//         w (X, N, K), N a multiple of 16, bias (X, N), y (positions, N), tiles for passes over tokens, one split.
// Floor:  bytes of codes and records, once for each tile of tokens.
//         The loop (sm_90a, VX_NORM 0) takes 113 instructions for 512 bytes with up to 8 tokens and one row of tiles,
//         102 with 16 tokens and two: 26 to 28 cycles of four schedulers, where memory brings 512 bytes to a processor
//         in 35 (H100) or 25 (H200). With 64 tokens it takes 332 and 64 HMMA: the tensor cores limit.
#include "expert_tiles.h"
#include "input_norm.h"
#include "outputs.h"
#include "w4_codes.h"

#ifndef VX_TILES
#define VX_TILES 1
#endif
#ifndef VX_ROWS
#define VX_ROWS 1
#endif
#ifndef VX_FOLDS  // 1: a tile of 64 columns lies in one group; 2: each half of it; 4: each step
#define VX_FOLDS 2
#endif
#define WARPS 8
#define ROWS (TILE_ROWS * VX_ROWS)
#define TOKENS (8 * VX_TILES)
// Row tile r of those of a block, from `first` of `count` on
#define ROW_TILE(first, r, count) (VX_GATED ? (first) + (r) * (count) : min((first) + (r), (count) - 1))
#define STAGES (32 / (VX_BITS * VX_ROWS) > 3 ? 32 / (VX_BITS * VX_ROWS) : 3)
#define STEPS (4 / VX_FOLDS)  // of a tile's four that share a group
#define CHUNKS (RECORD_BYTES / 16)
#define STAGE_BYTES (VX_ROWS * (TILE_BYTES + VX_FOLDS * RECORD_BYTES))
#define RECORD_LOADS ((VX_ROWS * VX_FOLDS * CHUNKS + 31) / 32)

#if VX_DTYPE == VX_BF16
#define MAGIC 0x43004300u  // 128: the next 7 bits count ones
#define ONES 0x3f803f80u
#define MINUS 0xc300u
#else
#define MAGIC 0x64006400u  // 1024, 10 bits
#define ONES 0x3c003c00u
#define MINUS 0xe400u
#endif
#define BY_FLOAT (VX_BITS == 8 && VX_DTYPE == VX_BF16)  // 128 + code does not fit

// What `fragment` adds to the codes of a row to take their zero away
VX_DEV u32 minus_zero(int zero) { return BY_FLOAT ? 0xcb000000u + zero : (MINUS + zero) * 0x10001u; }

struct Masks {
  u32 nibbles, pairs;  // 0x000f000f, 0x00300030
};

// Fragment A of k-step `step` of a tile. codes: the lane's 16 bytes, of the tile or of the half; high: its
// 8 bytes of high bits.
VX_DEV void fragment(u32 (&a)[4], const uint4& codes, const uint2& high, int step,
                     const u32 (&minus)[2], const Masks& masks) {
  int half = step / 2, s = step % 2;
#if VX_BITS < 8
  u32 word = half ? (s ? codes.w : codes.z) : (s ? codes.y : codes.x);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 both = (word >> 4 * i & masks.nibbles) | MAGIC;
#if VX_BITS == 6
    u32 rest = half ? high.y : high.x;
    int at = 2 * (i + 4 * s) - 4;
    both |= (at < 0 ? rest << -at : rest >> at) & masks.pairs;
#endif
    a[i] = vx_fma2(both, ONES, minus[i % 2], elem());
  }
#else
#pragma unroll
  for (int p = 0; p < 2; p++) {
    u32 word = s ? (p ? codes.w : codes.z) : (p ? codes.y : codes.x);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#if BY_FLOAT  // 2^23 + code, exact; so is the difference in bf16
      float zero = __uint_as_float(minus[h]);
      float even = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + 2 * h)) + zero;
      float odd = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441 + 2 * h)) + zero;
      __nv_bfloat162 both = __floats2bfloat162_rn(even, odd);
      a[h + 2 * p] = *reinterpret_cast<u32*>(&both);
#else
      u32 both = __byte_perm(word, 0x64646464u, h ? 0x4342 : 0x4140);
      a[h + 2 * p] = vx_fma2(both, ONES, minus[h], elem());
#endif
    }
  }
#endif
}

// Where a lane copies from: its 16 bytes of each tile, and of each tile's records.
struct Source {
  const u8 *codes[VX_ROWS], *records[RECORD_LOADS];
  int column[RECORD_LOADS];  // of the tile, where the group begins; -1: nothing to copy
};

VX_DEV Source source_of(const u8* data, int row_tile, int row_tiles, int tiles, int groups, int lane) {
  Source source;
  size_t size = row_bytes(tiles, groups);
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++)
    source.codes[r] = data + ROW_TILE(row_tile, r, row_tiles) * size + lane * 16;
#pragma unroll
  for (int i = 0; i < RECORD_LOADS; i++) {
    int chunk = 32 * i + lane, row = chunk / (VX_FOLDS * CHUNKS);
    source.column[i] = row < VX_ROWS ? chunk / CHUNKS % VX_FOLDS * (TILE_COLS / VX_FOLDS) : -1;
    source.records[i] = data + ROW_TILE(row_tile, min(row, VX_ROWS - 1), row_tiles) * size +
                        (size_t)tiles * TILE_BYTES + chunk % CHUNKS * 16;
  }
  return source;
}

// Enqueues the copies of one tile of columns, for all rows of the block. The second half of the last one
// may have no group of its own: it is padding.
VX_DEV void fetch(u8* stage, const Source& source, int tile, int groups, int group_shift, int lane) {
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++)
#pragma unroll
    for (int at = 0; at < TILE_BYTES; at += 512) {
      if (at + 512 > TILE_BYTES && lane >= 16) break;
      vx_cp_async16(stage + r * TILE_BYTES + at + lane * 16,
                    source.codes[r] + (size_t)tile * TILE_BYTES + at, 16);
    }
#pragma unroll
  for (int i = 0; i < RECORD_LOADS; i++) {
    if (source.column[i] < 0) continue;
    int group = min((tile * TILE_COLS + source.column[i]) >> group_shift, groups - 1);
    vx_cp_async16(stage + VX_ROWS * TILE_BYTES + (32 * i + lane) * 16,
                  source.records[i] + group * RECORD_BYTES, 16);
  }
}

#if VX_NORM
// The weights of the norm for what `load_tokens` reads
VX_DEV void load_weights(float (&v)[8], const float* weight) {
  float first[4], second[4];
  load(first, weight), load(second, weight + (VX_BITS == 6 ? 16 : 4));
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = first[i], v[i + 4] = second[i];
}
#endif

// A lane's columns of a half of a tile
VX_DEV uint4 load_tokens(const elem* x) {
#if VX_BITS == 6
  uint2 first = *reinterpret_cast<const uint2*>(x), second = *reinterpret_cast<const uint2*>(x + 16);
  return make_uint4(first.x, first.y, second.x, second.y);
#else
  return *reinterpret_cast<const uint4*>(x);
#endif
}
// D = A B or D += A B for k-step `step` of a tile. b: both halves.
VX_DEV void multiply_step(float (&d)[4], const u32 (&a)[4], const uint4 (&b)[2], int step, bool first) {
  const uint4& x = b[step / 2];
  const u32 pair[2] = {step % 2 ? x.z : x.x, step % 2 ? x.w : x.y};
  if (first) {
    vx_mma_first(d, a, pair, elem());
  } else {
    vx_mma(d, a, pair, elem());
  }
}

// The sums of x over what meets one scale, which minima are multiplied by
VX_DEV void sum_of_tokens(float (&sums)[2], const uint4 (&b)[2], int fold) {
  const u32 ones[4] = {ONES, ONES, ONES, ONES};
  float part[4];
#pragma unroll
  for (int i = 0; i < STEPS; i++) multiply_step(part, ones, b, fold * STEPS + i, i == 0);
  sums[0] = part[0], sums[1] = part[1];
}

// Adds the products of the columns of a tile that share scales. b: fragments B of the tokens, both
// k-steps of a half in one.
VX_DEV void multiply(float (&sums)[VX_ROWS][VX_TILES][4], const u8* stage, int fold, int lane,
                     const uint4 (&b)[VX_TILES][2], const Masks& masks) {
  float totals[VX_TILES][2];
  if (VX_ZERO == 2)
#pragma unroll
    for (int t = 0; t < VX_TILES; t++) sum_of_tokens(totals[t], b[t], fold);
#pragma unroll
  for (int r = 0; r < VX_ROWS; r++) {
    const u8 *record = stage + VX_ROWS * TILE_BYTES + (VX_FOLDS * r + fold) * RECORD_BYTES;
    const u8 *tile = stage + r * TILE_BYTES;
    Factors f[2] = {factors_of(record, lane / 4), factors_of(record, lane / 4 + 8)};
    u32 minus[2] = {minus_zero(f[0].zero), minus_zero(f[1].zero)}, a[STEPS][4];
    uint2 high = {};
    if (VX_BITS == 6) high = *reinterpret_cast<const uint2*>(tile + HIGH_AT + lane * 8);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      int step = fold * STEPS + i;
      uint4 codes = *reinterpret_cast<const uint4*>(tile + lane * 16 + (VX_BITS == 8 ? step / 2 * 512 : 0));
      fragment(a[i], codes, high, step, minus, masks);
    }
#pragma unroll
    for (int t = 0; t < VX_TILES; t++) {
      float part[4];
#pragma unroll
      for (int i = 0; i < STEPS; i++) multiply_step(part, a[i], b[t], fold * STEPS + i, i == 0);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const Factors& row = f[e / 2];
        sums[r][t][e] += row.scale * part[e];
        if (VX_ZERO == 2) sums[r][t][e] += (row.low + MIDDLE * row.scale) * totals[t][e % 2];
      }
    }
  }
}

// begin_of(t): where the row of x begins that token t reads. shared: the block's.
template <class BeginOf>
VX_DEV void multiply_rows(const elem* x, BeginOf begin_of, const u8* __restrict__ data,
                          const float* __restrict__ bias, out_elem* y, float* partial, u32* arrivals, int* arrived,
                          const Added& added, const Norm& norm, float (&scales)[TOKENS], u8* shared, int token0,
                          int m, int n, int k, int pitch, int group_shift) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quarter = lane % 4;
  int row0 = blockIdx.x * (VX_GATED ? TILE_ROWS : ROWS), splits = gridDim.z;
  int tiles = (k + TILE_COLS - 1) / TILE_COLS, row_tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
  int groups = ((k - 1) >> group_shift) + 1;
  Source source = source_of(data, row0 / TILE_ROWS, row_tiles, tiles, groups, lane);
  int piece = blockIdx.z * WARPS + warp, pieces = splits * WARPS;
  int tile = piece * tiles / pieces, end = (piece + 1) * tiles / pieces;
  const elem* tokens[VX_TILES];
#pragma unroll
  for (int t = 0; t < VX_TILES; t++)
    tokens[t] = x + begin_of(min(token0 + 8 * t + lane / 4, m - 1)) + tile * TILE_COLS + quarter * LANE_COLS;

  float sums[VX_ROWS][VX_TILES][4] = {};
  u8 *ring = shared + warp * STAGES * STAGE_BYTES, *ring_end = ring + STAGES * STAGE_BYTES;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (tile + s < end) fetch(ring + s * STAGE_BYTES, source, tile + s, groups, group_shift, lane);
    vx_cp_commit();
  }
  // m is not negative, which the compiler cannot know: it would make the constants anew for each use
  Masks masks = {0x000f000fu ^ (u32)(m < 0), 0x00300030u ^ (u32)(m < 0)};
  u8 *stage = ring, *empty = ring_end - STAGE_BYTES;
  vx_wait_for_predecessor();
#if VX_NORM
  norm_scales(scales, norm, token0, m, k);
#endif
  for (; tile < end; tile++) {
    uint4 b[VX_TILES][2];
#pragma unroll
    for (int t = 0; t < VX_TILES; t++) {
      b[t][0] = load_tokens(tokens[t]);
      b[t][1] = tile * TILE_COLS + HALF_COLS < k ? load_tokens(tokens[t] + HALF_COLS)
                                                 : make_uint4(0, 0, 0, 0);
      tokens[t] += TILE_COLS;
    }
#if VX_NORM
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float weight[8];
      int column = tile * TILE_COLS + half * HALF_COLS;
      load_weights(weight, norm.weight + (column < k ? column : 0) + quarter * LANE_COLS);
#pragma unroll
      for (int t = 0; t < VX_TILES; t++) b[t][half] = normed(b[t][half], scales[8 * t + lane / 4], weight);
    }
#endif
    vx_cp_wait<STAGES - 2>();
    __syncwarp();  // the records are other lanes' copies; and the stage to fill has been read
    if (tile + STAGES - 1 < end) fetch(empty, source, tile + STAGES - 1, groups, group_shift, lane);
    vx_cp_commit();
#pragma unroll
    for (int fold = 0; fold < VX_FOLDS; fold++) multiply(sums, stage, fold, lane, b, masks);
    empty = stage;
    stage = stage + STAGE_BYTES < ring_end ? stage + STAGE_BYTES : ring;
  }

  vx_cp_wait<0>();
  __syncthreads();  // the rings end
  store_fragments<WARPS>(y, sums, reinterpret_cast<float*>(shared), bias, partial, arrivals, arrived, added, token0,
                         row0, m, n, pitch);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, VX_ROWS* VX_TILES <= 4 ? 2 : 1)
w4_linear(const elem* x, const u8* __restrict__ data, const float* __restrict__ bias, out_elem* y, float* partial,
          u32* arrivals, int m, int n, int k, int pitch, int group_shift, const elem* residual, float* squares,
          const float* __restrict__ norm, const float* norm_squares, int num_squares, float eps) {
  VX_DYNAMIC_SHARED(shared);
  __shared__ float scales[TOKENS];
  __shared__ int arrived;
  multiply_rows(x, OwnRow{k}, data, bias, y, partial, arrivals, &arrived, {residual, squares},
                {norm, norm_squares, num_squares, eps}, scales, shared, blockIdx.y * TOKENS, m, n, k, pitch,
                group_shift);
}
VX_EXPORT(w4_linear)

#if !VX_NORM && !VX_GATED && VX_TILES <= 4 && VX_BITS != 6 && VX_ZERO != 2  // what experts have
extern "C" __global__ void __launch_bounds__(32 * WARPS, VX_ROWS* VX_TILES <= 4 ? 2 : 1)
experts_w4(const elem* __restrict__ x, const u8* __restrict__ data, const float* __restrict__ bias,
           const int* __restrict__ order, const int* __restrict__ tiles, out_elem* __restrict__ y, int share,
           int n, int k, int group_shift) {
  VX_DYNAMIC_SHARED(shared);
  __shared__ float scales[TOKENS];
  ExpertTile tile = tile_of(tiles, blockIdx.y);
  if (tile.count == 0) return;
  size_t size = row_bytes((k + TILE_COLS - 1) / TILE_COLS, ((k - 1) >> group_shift) + 1);
  multiply_rows(x, RowOfSlot{order, tile.first, share, k}, data + (size_t)tile.expert * (n / TILE_ROWS) * size,
                bias ? bias + (size_t)tile.expert * n : nullptr, y + (size_t)tile.first * n, nullptr, nullptr,
                nullptr, {}, {}, scales, shared, 0, tile.count, n, k, n, group_shift);
}
VX_EXPORT(experts_w4)
#endif
