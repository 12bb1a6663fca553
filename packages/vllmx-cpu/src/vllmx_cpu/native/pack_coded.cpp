// Packs rows of one code a weight, with a scale (and a zero) for each unit of columns, into the blocks
// that affine_blocks.h and float8_blocks.h read. Runs once, at load.
#include "block_layout.h"
#include "team.h"

using namespace vx::layout;

namespace {

struct Source {
  const uint8_t* codes;  // (cols)
  const float* scales;   // (units)
  const int16_t* zeros;  // (units)
};

template <class Format>
void write_codes(uint8_t* block, int32_t lane, int32_t cols, const uint8_t* codes) {
  for (int32_t k = 0; k < cols; k += 32) {
    uint8_t some[32] = {0};
    __builtin_memcpy(some, codes + k, (size_t)(cols - k < 32 ? cols - k : 32));
    const int32_t u = k / Format::UNIT_COLS, g = k % Format::UNIT_COLS / 32;
    Codes<Format::BITS>::write(block + Format::codes(u, g) + lane * 4, some);
  }
}

template <class Format>
void pack(uint8_t* block, int32_t lane, int32_t cols, int32_t units, Source row) {
  if constexpr (Format::FAMILY == AFFINE) {
    write_codes<Format>(block, lane, cols, row.codes);
    for (int32_t u = 0; u < units; ++u) {
      __builtin_memcpy(block + Format::scale(u, units) + lane * 4, row.scales + u, 4);
      __builtin_memcpy(block + Format::zero(u, units) + lane * 2, row.zeros + u, 2);
    }
  } else if constexpr (Format::FAMILY == FLOAT8) {
    write_codes<Format>(block, lane, cols, row.codes);
    for (int32_t u = 0; u < units; ++u) {
      float scale = row.scales[u];
      for (int32_t k = u * Format::UNIT_COLS; k < (u + 1) * Format::UNIT_COLS && k < cols; ++k)
        if ((row.codes[k] & 0x7f) == 0x7f) scale = __builtin_nanf("");
      __builtin_memcpy(block + Format::scale(u, units) + lane * 4, &scale, 4);
    }
  }
}

}  // namespace

// As vx_pack_rows, for a kind of the families AFFINE or FLOAT8: codes (count, cols), scales and zeros
// (count, units). FLOAT8 has no zeros.
VX_API void vx_pack_coded(void* packed, int32_t kind, int32_t cols, int32_t features, const uint8_t* codes,
                          const float* scales, const int16_t* zeros, int32_t first, int32_t count) {
  const int32_t units = units_of(kind, cols);
  for (int32_t i = 0; i < count; ++i) {
    const Place place = place_of(first + i, features);
    uint8_t* block = (uint8_t*)packed + (size_t)place.block * block_bytes(kind, cols);
    const size_t at = (size_t)i * (size_t)units;
    const Source row = {codes + (size_t)i * (size_t)cols, scales + at, zeros ? zeros + at : nullptr};
    visit_format(kind, 0, [=](auto format) {
      pack<decltype(format)>(block, place.lane, cols, units, row);
      return 0;
    });
  }
}
