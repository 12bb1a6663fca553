// How the threads of a team share the weights of one `linear`.
#pragma once
#include "ops.h"
#include "simd.h"

namespace vx {
namespace VX_ISA {

enum {
  CHUNK_BYTES = 256 << 10,  // of weights; half of a small second-level cache
  FETCH_AHEAD = 2048,       // bytes between a weight's prefetch and its use
};

// Calls body(first, last) with ranges of tiles until all are done. A chunk's weights stay in the
// second-level cache while the panels pass by; with one panel (decode) they stream from memory once.
struct Chunks {
  int32_t bytes, shares;  // at most, of weights; at least, for each thread
};
template <class Body>
VX_INLINE void for_chunks(const VxWeight* w, size_t tile_bytes, Chunks size, VxCtx* ctx, Body body) {
  int32_t chunk = (int32_t)((size_t)size.bytes / tile_bytes);
  const int32_t fair = w->tiles / (ctx->nth * size.shares);  // enough chunks for everybody
  if (chunk > fair) chunk = fair;
  if (chunk < 1) chunk = 1;
  for (int32_t first; (first = vx_next(ctx) * chunk) < w->tiles;)
    body(first, first + chunk < w->tiles ? first + chunk : w->tiles);
}

}  // namespace VX_ISA
}  // namespace vx
