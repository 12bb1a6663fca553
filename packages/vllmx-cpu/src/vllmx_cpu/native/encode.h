// What the encoders of one instruction set offer; encode_rows.cpp picks one and calls it.
#pragma once
#include "vx.h"

// Floats in rows that lie one behind the other, and where they go.
struct VxEncode {
  int32_t kind;                  // VxBlockKind, or VX_ROWS_INT8, VX_ROWS_FP8
  int32_t source_kind;           // VxDType
  const void* source;            // (rows, cols)
  int64_t rows;
  int32_t cols;                  // a multiple of the kind's block
  int32_t measure;               // 1: fill the sums
  uint8_t* out;                  // the blocks, row after row; of the two kinds of rows: the codes
  float* scales;                 // (rows) of the two kinds of rows
  double squared_error;          // out, added to: what the blocks express against the values
  double squared_value;          // out, added to
};

enum : int32_t { VX_ROWS_INT8 = 48, VX_ROWS_FP8 = 49 };
// 0, -1: a value is not finite, -2: there is no encoder for this kind.
typedef int32_t (*VxEncoder)(VxEncode* job);
