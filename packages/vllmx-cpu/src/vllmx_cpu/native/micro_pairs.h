// The inner loop of `linear` for codes that are multiplied by VNNI: two blocks of 16 rows at once, which
// share each broadcast of a quad, so that the dot products and not the loads are the bound. The sums and
// the order of the floats are those of `micro_blocks`.
#pragma once
#include "affine_blocks.h"
#include "scaled_blocks.h"
#include "weight_fetch.h"

namespace vx {
namespace VX_ISA {

// The kinds whose units have one sum of products of bytes.
template <class Kind>
static constexpr bool ONE_SUM = false;
template <class Format>
static constexpr bool ONE_SUM<ScaledBlocks<Format>> = true;
template <class Format>
static constexpr bool ONE_SUM<AffineBlocks<Format>> = true;

// The codes of a unit of 32 * PARTS columns as bytes, eight vectors for each 32 columns: where they lie, or
// unpacked into `room`.
template <class Format>
static constexpr bool CODES_IN_PLACE = Format::BITS == 8 && !Format::TABLE && CODE_BIAS<Format> == 0;
template <class Format, int PARTS>
VX_INLINE const uint8_t* unit_codes(const uint8_t* block, int32_t u, uint8_t* room) {
  if constexpr (CODES_IN_PLACE<Format>) return block + Format::codes(u, 0);
#pragma GCC unroll 1
  for (int part = 0; part < PARTS; ++part) {
    NativeU w[8];
    load_codes<Format>(block + Format::codes(u, part), w);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) store_as(room + part * 512 + j * 64, w[j]);
  }
  return room;
}

// As `micro`, for 32 rows.
template <class Kind, int MB>
static void micro_pairs(const uint8_t* w, size_t block_bytes, int32_t units, const uint8_t* panel, float* c,
                        const uint8_t* next) {
  typedef typename Kind::Format Format;
  enum { PARTS = Kind::UNIT_COLS / 32 };
  alignas(64) uint8_t room[2][CODES_IN_PLACE<Format> ? 1 : PARTS * 512];
  NativeF acc[2][MB];
#pragma GCC unroll 16
  for (int t = 0; t < MB; ++t) acc[0][t] = acc[1][t] = zero();
  const uint8_t* x = panel;
  for (int32_t u = 0; u < units; ++u, x += MB * (size_t)Kind::PANEL_BYTES) {
    if (next) WeightFetch<Kind, 2>::before_unit(w, block_bytes, u, units, next);
    const typename Kind::Scales scales[2] = {Kind::load_scales(w, u, units),
                                             Kind::load_scales(w + block_bytes, u, units)};
    const uint8_t* codes[2] = {unit_codes<Format, PARTS>(w, u, room[0]),
                               unit_codes<Format, PARTS>(w + block_bytes, u, room[1])};
    for_groups<MB>([&](auto first, auto count) __attribute__((always_inline)) {
      constexpr int TOKENS = decltype(count)::value;
      const uint8_t* tokens = x + first * Kind::PANEL_BYTES;
      NativeI sum[2][TOKENS];
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r) sum[r][t] = Kind::start(tokens + t * Kind::PANEL_BYTES, scales[r]);
#pragma GCC unroll 1
      for (int part = 0; part < PARTS; ++part) {
        const uint8_t* quads = tokens + Kind::QUADS + part * 32;
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
          const __m512i rows[2] = {_mm512_loadu_si512(codes[0] + part * 512 + j * 64),
                                   _mm512_loadu_si512(codes[1] + part * 512 + j * 64)};
#pragma GCC unroll 4
          for (int t = 0; t < TOKENS; ++t) {
            __m512i quad = _mm512_set1_epi32(read_as<int32_t>(quads + t * Kind::PANEL_BYTES + j * 4));
            __asm__("" : "+v"(quad));  // one load for both, not an operand of each
#pragma GCC unroll 2
            for (int r = 0; r < 2; ++r)
              sum[r][t] = (NativeI)_mm512_dpbusd_epi32((__m512i)sum[r][t], rows[r], quad);
          }
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r)
          acc[r][first + t] = Kind::add(acc[r][first + t], sum[r][t], scales[r], tokens + t * Kind::PANEL_BYTES);
    });
  }
#pragma GCC unroll 16
  for (int t = 0; t < MB; ++t)
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) store_as(c + t * 32 + r * 16, acc[r][t]);
}

}  // namespace VX_ISA
}  // namespace vx
