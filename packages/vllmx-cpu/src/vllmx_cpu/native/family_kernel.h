// Which kernel multiplies so many rows by a quantised kind.
#pragma once
#include "micro_linear.h"
#if defined(__AMX_INT8__)
#include "tile_linear.h"
#endif

namespace vx {
namespace VX_ISA {

#if !defined(__AMX_INT8__)
template <class Format>
static constexpr int32_t TILES_FROM = INT32_MAX;  // rows
#endif

// Null for a kind that is not of FAMILY.
template <layout::Family FAMILY>
static const Kernel* family_kernel(int32_t kind, [[maybe_unused]] int32_t rows) {
  return layout::visit_format(kind, (const Kernel*)nullptr, [=](auto format) -> const Kernel* {
    typedef decltype(format) Format;
    if constexpr (Format::FAMILY == FAMILY) {
      constexpr int32_t FEWER = TILES_FROM<Format> - 1;  // rows
#if defined(__AMX_INT8__)
      if (rows > FEWER) return &TileKernel<Format>::kernel;
#endif
#if defined(__AVX512VNNI__)
      if constexpr (FAMILY == layout::SUPER)
        if constexpr (FEWER >= SuperPairs<Format>::FROM_TOKENS)
          if (rows >= SuperPairs<Format>::FROM_TOKENS) return &SuperPairsKernel<Format>::kernel;
#endif
      // A kernel for each number of tokens makes a large library: there are only those that can be called.
      if constexpr (FEWER > 0) {
        constexpr int MOST = FEWER < MICRO_TOKENS ? FEWER : (int32_t)MICRO_TOKENS;
        return &MicroKernel<BlockKind<Format>, MOST>::kernel;
      }
    }
    return nullptr;
  });
}

}  // namespace VX_ISA
}  // namespace vx
