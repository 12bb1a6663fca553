// How the threads of a team share the weights of one `linear`.
#pragma once
#include "ops.h"
#include "weight_fetch.h"

namespace vx {
namespace VX_ISA {

enum { CHUNK_BYTES = 256 << 10 };  // of weights; half of a small second-level cache

// Calls body(first, last) with ranges of tiles until all are done. A chunk's weights stay in the
// second-level cache while the panels pass by; with one panel (decode) they stream from memory once.
struct Chunks {
  int32_t bytes, shares;  // at most, of weights; at least, for each thread
};
VX_INLINE int32_t tiles_in_chunk(const VxWeight* w, size_t tile_bytes, Chunks size, const VxCtx* ctx) {
  int32_t chunk = (int32_t)((size_t)size.bytes / tile_bytes);
  const int32_t fair = w->tiles / (ctx->nth * size.shares);  // enough chunks for everybody
  if (chunk > fair) chunk = fair;
  return chunk < 1 ? 1 : chunk;
}
template <class Body>
VX_INLINE void for_chunks(const VxWeight* w, size_t tile_bytes, Chunks size, VxCtx* ctx, Body body) {
  const int32_t chunk = tiles_in_chunk(w, tile_bytes, size, ctx);
  for (int32_t first; (first = vx_next(ctx) * chunk) < w->tiles;)
    body(first, first + chunk < w->tiles ? first + chunk : w->tiles);
}

// The same, where a thread knows in time what it goes on with: body(first, last, next) with the first tile
// of its next range, or -1.
template <class Body>
VX_INLINE void for_chunks_ahead(const VxWeight* w, size_t tile_bytes, Chunks size, VxCtx* ctx, Body body) {
  const int32_t chunk = tiles_in_chunk(w, tile_bytes, size, ctx);
  int32_t first = vx_next(ctx) * chunk;
  while (first < w->tiles) {
    const int32_t last = first + chunk < w->tiles ? first + chunk : w->tiles, next = vx_next(ctx) * chunk;
    body(first, last, next < w->tiles ? next : -1);
    first = next;
  }
}

}  // namespace VX_ISA
}  // namespace vx
