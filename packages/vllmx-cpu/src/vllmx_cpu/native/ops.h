// Arguments of the ops that share them. `structs.py` mirrors every struct here, and native.py compares
// the sizes.
#pragma once
#include "vx.h"

enum VxActivation : int32_t { VX_NONE = -1, VX_SILU = 0, VX_GELU = 1, VX_GELU_TANH = 2, VX_RELU = 3, VX_RELU2 = 7 };

// Quantised weights, beside the VxDType kinds; block_layout.h. After GGUF's types: (code - zero) * scale
// with 4 or 8 bits and both for 32, 64 or 128 columns; float8 e4m3.
enum VxBlockKind : int32_t {
  VX_Q4_0 = 16, VX_Q8_0 = 17, VX_Q4_K = 18, VX_Q5_K = 19, VX_Q6_K = 20, VX_Q4_1 = 21, VX_Q5_0 = 22,
  VX_Q5_1 = 23, VX_Q2_K = 24, VX_Q3_K = 25, VX_IQ4_NL = 26, VX_IQ4_XS = 27, VX_MXFP4 = 28,
  VX_AFFINE4_32 = 32, VX_AFFINE4_64 = 33, VX_AFFINE4_128 = 34, VX_AFFINE8_32 = 35, VX_AFFINE8_64 = 36,
  VX_AFFINE8_128 = 37, VX_FLOAT8 = 40,
};

// A packed matrix: tiles of 32 output rows, each two blocks of 16 rows; see product.h.
struct VxWeight {
  const void* data;
  const float* bias;      // in packed row order, or null
  int32_t kind;           // VxDType of the elements, or VxBlockKind
  int32_t rows, cols;     // N output features; packed columns
  int32_t tiles;
  int32_t gated;          // 1: tile j holds gate rows 16j ... and up rows 16j ... (rows = 2F)
  int32_t features;       // K input features
  const int32_t* columns; // (cols) input feature of each packed column, -1: none; or null: in order
};

// y = x W^T + bias for T rows of x, or for the L logit rows. With `activation`, act(y), or of a gated W
// y (T, F) = act(gate) * up. With `softcap` c, y = c tanh(y / c).
struct VxLinear {
  VxWeight w;
  const float* x;         // (T, K)
  float* y;               // (T, N), (T, F) or (L, N)
  void* panels;           // room for the packed activations of the largest step
  int32_t activation;     // VxActivation, or VX_NONE
  int32_t logit_rows;     // 1: rows of x are picked by step->logit_rows
  float softcap;          // 0 = none
  int32_t stride;         // from a row of y to the next; 0: as many as the row has
};

struct VxEmbedding {
  VxWeight w;             // (V, E)
  float* y;               // (T, E)
  int32_t source;         // 0: tokens, 1: positions, 2: token types
  int32_t offset;         // added to each
};

struct VxNorm {
  const float* x;         // (T, E)
  const float* residual;  // (T, E) or null
  const float* weight;    // (E)
  const float* bias;      // (E) or null
  float* sum;             // (T, E) x + residual, or null
  float* y;               // (T, E)
  int32_t width;
  float eps;
};

// Element by element: y = act(x), act(gate) * up, x + other or x * factor.
struct VxElementwise {
  const float* x;         // (T, width), for gated_act (T, 2 width)
  const float* other;     // (T, width) or null
  float* y;               // (T, width)
  int32_t width;
  int32_t activation;
  float factor;
};
