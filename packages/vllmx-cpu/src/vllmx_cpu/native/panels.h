// Activations as the micro kernels read them: panels of tokens, each [units][tokens], so that the inner
// loop reads both operands from front to back, rounded to what the weights' kind multiplies.
#pragma once
#include "product.h"
#include "simd.h"

namespace vx {
namespace VX_ISA {

// Up to here each thread packs for itself: what is only rounded, and what is quantised, which is more work.
enum { PRIVATE_PANEL_BYTES = 256 << 10, PRIVATE_QUANTISED_BYTES = 16 << 10 };
template <class Kind>
static constexpr size_t PRIVATE_BYTES = Kind::QUANTISED ? PRIVATE_QUANTISED_BYTES : PRIVATE_PANEL_BYTES;
template <class Kind>
static constexpr int32_t PARTS = Kind::QUANTISED ? 4 : 1;

// Calls visit(activations, u) for the units first ... last - 1 of a row x, in the weights' order of columns. A last unit that is wider than what is left of the row is filled up with zeros.
template <int COLS, class Visit>
VX_INLINE void for_units(const VxWeight* w, const float* x, int32_t first, int32_t last, Visit visit) {
  const int32_t cols = w->cols;
  for (int32_t u = first; u < last; ++u) {
    const int32_t k = u * COLS;
    if (!w->columns && cols - k >= COLS) {
      visit(x + k, u);
      continue;
    }
    float unit[COLS];
    for (int32_t i = 0; i < COLS; ++i) {
      const int32_t feature = k + i >= cols ? -1 : w->columns ? w->columns[k + i] : k + i;
      unit[i] = feature < 0 ? 0.0f : x[feature];
    }
    visit(unit, u);
  }
}

// One token's activations, of quantised kinds those of units first ... last - 1, into its column of a panel
// of `tokens` columns.
template <class Kind>
static void pack_row(const VxWeight* w, const float* x, int32_t first, int32_t last, int32_t tokens,
                     uint8_t* out) {
  const int32_t cols = w->cols;
  const size_t stride = (size_t)tokens * Kind::PANEL_BYTES;
  if constexpr (Kind::QUANTISED) {
    for_units<Kind::UNIT_COLS>(w, x, first, last, [&](const float* unit, int32_t u) {
      Kind::pack_unit(unit, out + (size_t)u * stride);
    });
  } else if constexpr (Kind::UNIT_COLS == 32) {
    for (int32_t k = 0; k < cols; k += 32, out += stride) Kind::round_unit(x + k, cols - k, out);
  } else {
    for (int32_t k = 0; k < cols; k += 16) {
      const int32_t left = cols - k < 16 ? cols - k : 16;
      const F32x16 v = left == 16 ? load(x + k) : load_n(x + k, left);
      float lanes[16];
      if (Kind::PANEL_BYTES * Kind::UNIT_COLS == 8)  // pairs of bf16 in one word
        store_bf16((uint16_t*)lanes, v);
      else
        store(lanes, v);
      const int32_t units = (left + Kind::UNIT_COLS - 1) / Kind::UNIT_COLS;
      for (int32_t u = 0; u < units; ++u, out += stride)
        __builtin_memcpy(out, (const uint8_t*)lanes + u * Kind::PANEL_BYTES, Kind::PANEL_BYTES);
    }
  }
}

#if VX_NATIVE_BYTES == 64
// Sixteen rows of sixteen words, turned about.
VX_INLINE void transpose(__m512i* r) {
  __m512i pairs[16], fours[16], eights[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      fours[i + 2 * h] = _mm512_unpacklo_epi64(pairs[i + h], pairs[i + 2 + h]);
      fours[i + 2 * h + 1] = _mm512_unpackhi_epi64(pairs[i + h], pairs[i + 2 + h]);
    }
#pragma GCC unroll 2
  for (int i = 0; i < 16; i += 8)
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      eights[i + c] = _mm512_shuffle_i32x4(fours[i + c], fours[i + 4 + c], 0x88);      // quarters 0, 2
      eights[i + 4 + c] = _mm512_shuffle_i32x4(fours[i + c], fours[i + 4 + c], 0xdd);  // 1, 3
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_i32x4(eights[c], eights[8 + c], 0x88);
    r[4 + c] = _mm512_shuffle_i32x4(eights[4 + c], eights[12 + c], 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(eights[c], eights[8 + c], 0xdd);
    r[12 + c] = _mm512_shuffle_i32x4(eights[4 + c], eights[12 + c], 0xdd);
  }
}

// Sixteen words of a panel, from x on, where a row has `left` values more; zeros behind them.
template <class Kind>
VX_INLINE __m512i panel_words(const float* x, int32_t left) {
  const F32x16 low = left >= 16 ? load(x) : load_n(x, left);
  if constexpr (Kind::UNIT_COLS == 1) return (__m512i)low;
  const F32x16 high = left >= 32 ? load(x + 16) : left > 16 ? load_n(x + 16, left - 16) : zero();
  const __m256i pairs[2] = {_mm512_cvtepi32_epi16((__m512i)bf16_bits(low)),
                            _mm512_cvtepi32_epi16((__m512i)bf16_bits(high))};
  return _mm512_inserti64x4(_mm512_castsi256_si512(pairs[0]), pairs[1], 1);
}

// All tokens of a panel, 2 ... 16 of them, sixteen units at a time: words side by side, no store of single ones.
template <class Kind>
static void pack_words(const Product& a, int32_t units, int32_t row, int32_t tokens, uint8_t* out) {
  const __mmask16 mask = (__mmask16)((1u << tokens) - 1);
  const float* x[16];
  for (int32_t t = 0; t < tokens; ++t) x[t] = a.row(row + t);
  __m512i words[16];
  for (int t = 0; t < 16; ++t) words[t] = _mm512_setzero_si512();
  for (int32_t u = 0; u < units; u += 16) {
    const int32_t k = u * Kind::UNIT_COLS, left = a.w.cols - k, count = units - u < 16 ? units - u : 16;
    for (int32_t t = 0; t < tokens; ++t) words[t] = panel_words<Kind>(x[t] + k, left);
    __m512i turned[16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) turned[t] = words[t];
    transpose(turned);
    for (int32_t i = 0; i < count; ++i, out += (size_t)tokens * 4) _mm512_mask_storeu_epi32(out, mask, turned[i]);
  }
}
template <class Kind>
static constexpr bool IN_WORDS = !Kind::QUANTISED && Kind::UNIT_COLS <= 2 && Kind::PANEL_BYTES == 4;
#endif

// Part `part` of `parts` of a panel: a range of its units, so that threads write to lines of their own.
template <class Kind>
static void pack_panel(const Product& a, const Panels& p, int32_t panel, int32_t part, int32_t parts) {
  const int32_t begin = p.begin(panel), tokens = p.begin(panel + 1) - begin;
  const int32_t first = p.units * part / parts, last = p.units * (part + 1) / parts;
  uint8_t* out = p.base + (size_t)begin * p.units * Kind::PANEL_BYTES;
#if VX_NATIVE_BYTES == 64
  if constexpr (IN_WORDS<Kind>)
    if (tokens > 1) {
      pack_words<Kind>(a, p.units, begin, tokens, out);
      return;
    }
#endif
  for (int32_t t = 0; t < tokens; ++t)
    pack_row<Kind>(&a.w, a.row(begin + t), first, last, tokens, out + t * Kind::PANEL_BYTES);
}

// Panels of `size` rows.
template <class Kind>
static Panels panels_of(const Product& a, int32_t size) {
  Panels p = {};
  p.rows = a.rows, p.size = size;
  p.units = (a.w.cols + Kind::UNIT_COLS - 1) / Kind::UNIT_COLS;
  p.count = (a.rows + size - 1) / size;
  p.bytes = (size_t)a.rows * p.units * Kind::PANEL_BYTES;
  return p;
}
// The fewest panels of at most MOST rows, all of about the same size.
template <class Kind>
static Panels even_panels(const Product& a, int32_t most) {
  const int32_t count = (a.rows + most - 1) / most;
  return panels_of<Kind>(a, (a.rows + count - 1) / count);
}

}  // namespace VX_ISA
}  // namespace vx
