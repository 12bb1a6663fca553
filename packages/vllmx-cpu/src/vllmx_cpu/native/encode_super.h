// Super-blocks of 256 values: vllmx_models.formats.gguf.quantize.k in C++, with the same bytes. Groups find
// their own scales, the super-block's follow, and small integers between them are tried around the
// nearest ones. Sums over a super-block take value g of each group before value g + 1 of any.
#pragma once
#include "encode_simple.h"

namespace vx {
namespace VX_ISA {
namespace encode {

// --- value = d * scale * q - dmin * minimum, in S groups of G --------------------------------------
struct Minima {
  F32x16 d, dmin;
  F32x16 scales[16], minima[16];  // small whole numbers
};

template <int G, int S>
struct AffineGroups {
  Tile& tile;
  float high, limit;
  Minima state;

  const float* value(int s, int g) const { return tile.values + (s * G + g) * 16; }

  void search_small() {
    F32x16 scale[S], minimum[S];
    for (int s = 0; s < S; ++s) scale[s] = state.scales[s], minimum[s] = state.minima[s];
    F32x16 most = scale[0], lowest = minimum[0];
    for (int s = 1; s < S; ++s) most = max(most, scale[s]), lowest = max(lowest, minimum[s]);
    state.d = f16_not_below(most / splat(limit));
    state.dmin = f16_not_below(lowest / splat(limit));
    const F32x16 per_d = inverse(state.d), per_dmin = inverse(state.dmin);
    for (int s = 0; s < S; ++s) {
      state.scales[s] = clip(nearest(scale[s] * per_d), 0, limit);
      state.minima[s] = clip(nearest(minimum[s] * per_dmin), 0, limit);
      try_neighbours(s);
    }
  }

  void try_neighbours(int s) {
    static const float moves[5][2] = {{0, 0}, {-1, 0}, {1, 0}, {0, -1}, {0, 1}};
    const F32x16 scale = state.scales[s], low = state.minima[s];
    F32x16 least = splat(__builtin_inff());
    for (int m = 0; m < 5; ++m) {
      const F32x16 a = clip(scale + splat(moves[m][0]), 0, limit);
      const F32x16 b = clip(low + splat(moves[m][1]), 0, limit);
      const F32x16 minimum = b * state.dmin, step = a * state.d, inverse_step = inverse(step);
      F32x16 error = zero();
      for (int g = 0; g < G; ++g) {
        const F32x16 x = load(value(s, g));
        const F32x16 e = (codes_of(x + minimum, inverse_step, 0, high) * step - minimum) - x;
        error = error + e * e;
      }
      const I32x16 better = error < least;
      keep_better(better, &state.scales[s], a);
      keep_better(better, &state.minima[s], b);
      keep_better(better, &least, error);
    }
  }

  // The codes under (d, dmin), and their error.
  F32x16 apply(F32x16 d, F32x16 dmin, float* codes) const {
    F32x16 total = zero();
    for (int s = 0; s < S; ++s) {
      const F32x16 step = state.scales[s] * d, minimum = state.minima[s] * dmin;
      const F32x16 inverse_step = inverse(step);
      F32x16 error = zero();
      for (int g = 0; g < G; ++g) {
        const F32x16 x = load(value(s, g)), q = codes_of(x + minimum, inverse_step, 0, high);
        store(codes + (s * G + g) * 16, q);
        const F32x16 e = (q * step - minimum) - x;
        error = error + e * e;
      }
      total = s ? total + error : error;
    }
    return total;
  }

  // (d, dmin) of least squares for the codes in tile.codes.
  void refit(F32x16* d, F32x16* dmin) const {
    F32x16 ss = zero(), ll = zero(), sl = zero(), sv = zero(), lv = zero();
    for (int g = 0; g < G; ++g)
      for (int s = 0; s < S; ++s) {
        const F32x16 x = load(value(s, g)), level = state.minima[s];
        const F32x16 slope = load(tile.codes + (s * G + g) * 16) * state.scales[s];
        ss = ss + slope * slope;
        ll = ll + level * level;
        sl = sl + slope * level;
        sv = sv + slope * x;
        lv = lv + level * x;
      }
    const F32x16 determinant = inverse(sl * sl - ss * ll);
    const F32x16 a = (sl * lv - sv * ll) * determinant, b = (ss * lv - sl * sv) * determinant;
    const F32x16 alone = sv * inverse(ss);
    const I32x16 usable = (a > zero()) & (b > zero());
    *d = f16(select(usable, a, select(alone > zero(), alone, zero())));
    *dmin = f16(select(usable, b, zero()));
  }

  template <int COUNT>
  void run(const Spread<COUNT>& steps) {
    for (int s = 0; s < S; ++s) {
      const Line line = AffineSearch<G>::run(value(s, 0), high, steps, false);
      state.scales[s] = line.scale;
      state.minima[s] = zero() - line.offset;
    }
    search_small();
    const F32x16 error = apply(state.d, state.dmin, tile.codes);
    F32x16 d, dmin;
    refit(&d, &dmin);
    const I32x16 better = apply(d, dmin, tile.found) < error;
    keep_better(better, &state.d, d);
    keep_better(better, &state.dmin, dmin);
    for (int s = 0; s < S; ++s) {
      const F32x16 step = state.scales[s] * state.d, minimum = state.minima[s] * state.dmin;
      for (int g = 0; g < G; ++g) {
        const int at = (s * G + g) * 16;
        const F32x16 q = select(better, load(tile.found + at), load(tile.codes + at));
        store(tile.codes + at, q);
        store(tile.found + at, q * step - minimum);
      }
    }
  }
};

VX_INLINE U32x16 code_at(const Tile& tile, int i) { return whole(load(tile.codes + i * 16)); }

// Eight scales and minima of six bits in twelve bytes.
static void put_scales_and_minima(const Minima& state, const Blocks& out, int offset) {
  U32x16 first[4], second[4], third[4];
  for (int i = 0; i < 4; ++i) {
    const U32x16 a = whole(state.scales[4 + i]), b = whole(state.minima[4 + i]);
    first[i] = whole(state.scales[i]) | (a & splat_u32(0x30)) << 2;
    second[i] = whole(state.minima[i]) | (b & splat_u32(0x30)) << 2;
    third[i] = (a & splat_u32(15)) | (b & splat_u32(15)) << 4;
  }
  out.words(offset, word_of(first));
  out.words(offset + 4, word_of(second));
  out.words(offset + 8, word_of(third));
}

struct EncodeQ4_K {
  enum { VALUES = 256, BYTES = 144, REACH = 8 };
  static void run(Tile& tile, const Blocks& out) {
    static constexpr Spread<5> steps(-1.4, 1.0);
    AffineGroups<32, 8> groups = {tile, 15, 63, {}};
    groups.run(steps);
    out.halves(0, half_bits(groups.state.d));
    out.halves(2, half_bits(groups.state.dmin));
    put_scales_and_minima(groups.state, out, 4);
    put_planes<256, 32, 4>(out, 16, [&](int i) { return code_at(tile, i); });
  }
};
struct EncodeQ5_K {
  enum { VALUES = 256, BYTES = 176, REACH = 8 };
  static void run(Tile& tile, const Blocks& out) {
    static constexpr Spread<5> steps(-1.4, 0.8);
    AffineGroups<32, 8> groups = {tile, 31, 63, {}};
    groups.run(steps);
    out.halves(0, half_bits(groups.state.d));
    out.halves(2, half_bits(groups.state.dmin));
    put_scales_and_minima(groups.state, out, 4);
    put_planes<256, 32, 1>(out, 16, [&](int i) { return code_at(tile, i) >> 4; });
    put_planes<256, 32, 4>(out, 48, [&](int i) { return code_at(tile, i) & splat_u32(15); });
  }
};
struct EncodeQ2_K {
  enum { VALUES = 256, BYTES = 84, REACH = 8 };
  static void run(Tile& tile, const Blocks& out) {
    static constexpr Spread<7> steps(-0.6, 1.2);
    AffineGroups<16, 16> groups = {tile, 3, 15, {}};
    groups.run(steps);
    put_planes<16, 16, 8>(out, 0, [&](int s) {
      return whole(groups.state.scales[s]) | whole(groups.state.minima[s]) << 4;
    });
    put_planes<256, 32, 2>(out, 16, [&](int i) { return code_at(tile, i); });
    out.halves(80, half_bits(groups.state.d));
    out.halves(82, half_bits(groups.state.dmin));
  }
};

// --- value = d * scale * q, in sixteen groups of sixteen -------------------------------------------
struct SymmetricGroups {
  enum { G = 16, S = 16 };
  Tile& tile;
  float high, limit;  // q in [-high - 1, high], scales in [-limit, limit)
  F32x16 d, scales[S];

  const float* value(int s, int g) const { return tile.values + (s * G + g) * 16; }
  F32x16 code(F32x16 x, F32x16 inverse_step) const { return codes_of(x, inverse_step, -high - 1, high); }

  void search_small() {
    F32x16 extreme = scales[0], reach = abs(extreme);
    for (int s = 1; s < S; ++s) {
      keep_better(abs(scales[s]) > reach, &extreme, scales[s]);
      reach = max(reach, abs(scales[s]));
    }
    d = f16_not_below(extreme / splat(-limit));
    const F32x16 per_d = inverse(d);
    for (int s = 0; s < S; ++s) {
      const F32x16 small = clip(nearest(scales[s] * per_d), -limit, limit - 1);
      F32x16 least = splat(__builtin_inff());
      for (int m = 0; m < 3; ++m) {
        const F32x16 a = clip(small + splat(m == 1 ? -1.0f : m == 2 ? 1.0f : 0.0f), -limit, limit - 1);
        const F32x16 step = a * d, inverse_step = inverse(step);
        F32x16 error = zero();
        for (int g = 0; g < G; ++g) {
          const F32x16 x = load(value(s, g)), e = code(x, inverse_step) * step - x;
          error = error + e * e;
        }
        const I32x16 better = error < least;
        keep_better(better, &scales[s], a);
        keep_better(better, &least, error);
      }
    }
  }

  F32x16 apply(F32x16 by, float* codes) const {
    F32x16 total = zero();
    for (int s = 0; s < S; ++s) {
      const F32x16 step = scales[s] * by, inverse_step = inverse(step);
      F32x16 error = zero();
      for (int g = 0; g < G; ++g) {
        const F32x16 x = load(value(s, g)), q = code(x, inverse_step), e = q * step - x;
        store(codes + (s * G + g) * 16, q);
        error = error + e * e;
      }
      total = s ? total + error : error;
    }
    return total;
  }

  F32x16 refit() const {
    F32x16 squares = zero(), product = zero();
    for (int g = 0; g < G; ++g)
      for (int s = 0; s < S; ++s) {
        const F32x16 slope = load(tile.codes + (s * G + g) * 16) * scales[s];
        product = product + slope * load(value(s, g));
        squares = squares + slope * slope;
      }
    return f16(product * inverse(squares));
  }

  // Leaves codes counted from 0.
  template <int COUNT>
  void run(const Spread<COUNT>& steps) {
    for (int s = 0; s < S; ++s) scales[s] = search_symmetric<G>(value(s, 0), -high - 1, high, steps);
    search_small();
    const F32x16 error = apply(d, tile.codes), fitted = refit();
    const I32x16 better = apply(fitted, tile.found) < error;
    keep_better(better, &d, fitted);
    for (int s = 0; s < S; ++s) {
      const F32x16 step = scales[s] * d;
      for (int g = 0; g < G; ++g) {
        const int at = (s * G + g) * 16;
        const F32x16 q = select(better, load(tile.found + at), load(tile.codes + at));
        store(tile.codes + at, q + splat(high + 1));
        store(tile.found + at, q * step);
      }
    }
  }
};

struct EncodeQ6_K {
  enum { VALUES = 256, BYTES = 210, REACH = 8 };
  static void run(Tile& tile, const Blocks& out) {
    static constexpr Spread<7> steps(-0.9, 0.9);
    SymmetricGroups groups = {tile, 31, 128, {}, {}};
    groups.run(steps);
    put_planes<256, 64, 4>(out, 0, [&](int i) { return code_at(tile, i) & splat_u32(15); });
    put_planes<256, 32, 2>(out, 128, [&](int i) { return code_at(tile, i) >> 4; });
    put_planes<16, 16, 8>(out, 192, [&](int s) { return whole(groups.scales[s]) & splat_u32(255); });
    out.halves(208, half_bits(groups.d));
  }
};
struct EncodeQ3_K {
  enum { VALUES = 256, BYTES = 110, REACH = 8 };
  static void run(Tile& tile, const Blocks& out) {
    static constexpr Spread<10> steps(-0.9, 0.9);
    SymmetricGroups groups = {tile, 3, 32, {}, {}};
    groups.run(steps);
    const auto small = [&](int s) { return whole(groups.scales[s] + splat(32)); };
    put_planes<256, 32, 1>(out, 0, [&](int i) { return code_at(tile, i) >> 2; });
    put_planes<256, 32, 2>(out, 32, [&](int i) { return code_at(tile, i) & splat_u32(3); });
    put_planes<16, 8, 4>(out, 96, [&](int s) { return small(s) & splat_u32(15); });
    put_planes<16, 4, 2>(out, 104, [&](int s) { return small(s) >> 4; });
    out.halves(108, half_bits(groups.d));
  }
};

}  // namespace encode
}  // namespace VX_ISA
}  // namespace vx
