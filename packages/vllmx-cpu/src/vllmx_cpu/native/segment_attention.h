// Attention within the rows of a step or the windows of its images, both ways and without a cache.
//
// Keys and values of the whole step are laid out in the workspace as if they were pages (attention.h), each row from
// a page of its own on, and attention.cpp does the rest: its tiles, its partitions and its shares of
// (row, tile of queries, kv head). So a token's bits are a function of its row alone.
#pragma once
#include "images.h"

namespace vx {

struct VxSegmentAttention {
  const float* qkv;        // (T, (H + 2K) * D)
  float* out;              // (T, H * D)
  const float* rope;       // (positions, rotary_dim) cos | sin, or null
  const int32_t* rope_rows; // (T) rows of `rope`, or null: the positions
  void* workspace;         // vx_segment_workspace_bytes
  size_t workspace_bytes;
  int32_t num_heads, num_kv_heads, head_size, rotary_dim, interleaved;
  int32_t dtype;           // VxDType of keys and values
  int32_t window;          // tokens less than so many places away are seen; 0 = all
  float scale;
  const VxImages* images;  // segments are the windows of a tower's pass; null: the rows of the step
  // One of several calls that follow each other, each with a part of the queries; the first one lays out keys
  // and values for all.
  int32_t piece, pieces;
  // (H, 2 * bias_length - 1) added to the score of a key that is k - (bias_length - 1) places behind the query, for
  // entry k; null: none. bias_length is a multiple of 16 and at least the longest row: whole groups are read.
  const float* bias;
  int32_t bias_length;
};

// Where things lie in the workspace for a step of so many tokens in so many rows, the longest of which
// fills `table_width` pages.
struct SegmentRoom {
  enum { PAGE = 16, ALIGNMENT = 64 };
  size_t keys, values, places, slots, lengths, tables, bytes;

  // Pages of rows whose tokens add up to `tokens`: each may leave its last one almost empty.
  static size_t most_pages(int32_t tokens, int32_t rows) {
    return (size_t)tokens / PAGE + (rows < tokens ? rows : tokens);
  }

  SegmentRoom(size_t key_bytes, size_t value_bytes, int32_t tokens, int32_t rows, int32_t table_width) {
    const size_t pages = most_pages(tokens, rows), of_tokens = (size_t)tokens * sizeof(int32_t);
    bytes = 0;
    keys = take(pages * key_bytes);
    values = take(pages * value_bytes);
    places = take(of_tokens);
    slots = take(of_tokens);
    lengths = take((size_t)rows * sizeof(int32_t));
    tables = take((size_t)rows * table_width * sizeof(int32_t));
  }

 private:
  size_t take(size_t wanted) {
    const size_t start = bytes;
    bytes += (wanted + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return start;
  }
};

}  // namespace vx
