// VX: per instruction set
// Products of packed weights: activations into panels, chunks of output tiles from the shared counter, and
// what follows the sums.
#include "products.h"

#include "activation.h"
#include "block_layout.h"

namespace vx {
namespace VX_ISA {

namespace {

const Kernel* kernel_for(int32_t kind, int32_t rows) {
  if (kind < VX_Q4_0) return dense_kernel(kind);
  return layout::visit_format(kind, (const Kernel*)nullptr, [=](auto format) {
    switch (decltype(format)::FAMILY) {
      case layout::SCALED: return scaled_kernel(kind, rows);
      case layout::SUPER: return super_kernel(kind, rows);
      case layout::AFFINE: return affine_kernel(kind, rows);
      default: return float8_kernel(kind, rows);
    }
  });
}

size_t tile_bytes(const VxWeight& w) {
  if (w.kind >= VX_Q4_0) return 2 * layout::block_bytes(w.kind, w.cols);
  const size_t cols = w.kind == VX_BF16 ? ((size_t)w.cols + 1) / 2 * 2 : (size_t)w.cols;
  return cols * 32 * (w.kind == VX_F32 ? 4 : 2);
}

// One product of several, with its kernel and its panels.
struct Work {
  Product a;
  const Kernel* kernel;
  Panels panels;
  size_t tile_bytes;
  int32_t items;   // to be drawn: each chunk's with one group of panels after the other
  int32_t tiles;   // in a chunk
  int32_t groups;  // of panels

  const uint8_t* tile(int32_t i) const { return (const uint8_t*)a.w.data + (size_t)i * tile_bytes; }
  int32_t first_tile(int32_t item) const { return item / groups * tiles; }
};

Work work_of(const Products& products, int32_t part, uint8_t* base, size_t bytes) {
  const Part& p = products.parts[part];
  Work work = {products.all, nullptr, {}, bytes, 0, 0, 1};
  Product& a = work.a;
  a.w.data = (const uint8_t*)a.w.data + (size_t)p.matrix * (size_t)a.w.tiles * bytes;
  if (a.w.columns) a.w.columns += (size_t)p.matrix * (size_t)a.w.cols;
  if (a.w.bias) a.w.bias += (size_t)p.matrix * (size_t)a.w.tiles * 32;
  if (a.picks)
    a.picks += p.first;
  else
    a.x += (size_t)p.first * (size_t)a.w.features;
  a.y += (size_t)p.first * (size_t)a.stride;
  a.rows = p.rows;
  work.kernel = kernel_for(a.w.kind, a.rows);
  work.panels = work.kernel->shape(a);
  work.panels.base = base + p.panels;
  return work;
}

// Hands out the items of all parts, one after the other: `set` says how many a part has.
template <class Set>
class Shares {
 public:
  Shares(const Products& products, uint8_t* base, VxCtx* ctx, Set set)
      : products_(products), base_(base), bytes_(tile_bytes(products.all.w)), ctx_(ctx), set_(set) {
    open();
  }
  // The item of `work` that is this thread's next one; -1: there are no more.
  int32_t next() {
    const int32_t item = vx_next(ctx_);
    while (part_ < products_.count && item >= first_ + work.items) {
      first_ += work.items, ++part_;
      open();
    }
    return part_ < products_.count ? item - first_ : -1;
  }
  Work work;

 private:
  void open() {
    if (part_ == products_.count) return;
    work = work_of(products_, part_, base_, bytes_);
    set_(products_.parts[part_], &work);
  }
  const Products& products_;
  uint8_t* base_;
  size_t bytes_;
  VxCtx* ctx_;
  Set set_;
  int32_t part_ = 0, first_ = 0;
};

// Packed once for both: one row, the same.
bool same_rows(const Products& products, const Part& a, const Part& b) {
  const int32_t* picks = products.all.picks;
  return picks && !products.all.w.columns && a.rows == 1 && b.rows == 1 && picks[a.first] == picks[b.first];
}

// Packs all rows, and returns where their panels are.
uint8_t* pack_panels(const Products& products, VxCtx* ctx) {
  size_t bytes = 0, end = 0, most = 0;
  for (int32_t i = 0; i < products.count; ++i) {
    Part& part = products.parts[i];
    part.packed = i > 0 && same_rows(products, part, (&part)[-1]);
    if (!part.packed) bytes = end;
    part.panels = bytes;
    if (part.packed) continue;
    const Work work = work_of(products, i, nullptr, 0);
    end = (bytes + work.panels.bytes + 63) / 64 * 64;
    most = work.kernel->private_bytes;
  }
  const bool alone = end <= most && end <= ctx->scratch_bytes;
  uint8_t* base = alone ? ctx->scratch : (uint8_t*)products.panels;
  if (alone) {
    for (int32_t i = 0; i < products.count; ++i) {
      if (products.parts[i].packed) continue;
      const Work work = work_of(products, i, base, 0);
      for (int32_t panel = 0; panel < work.panels.count; ++panel)
        work.kernel->pack(work.a, work.panels, panel, 0, 1);
    }
    return base;
  }
  Shares shares(products, base, ctx, [](const Part& part, Work* work) {
    work->items = part.packed ? 0 : work->panels.count * work->kernel->parts;
  });
  for (int32_t i; (i = shares.next()) >= 0;) {
    const Work& work = shares.work;
    const int32_t parts = work.kernel->parts;
    work.kernel->pack(work.a, work.panels, i / parts, i % parts, parts);
  }
  vx_barrier(ctx);
  return base;
}

}  // namespace

void run_products(const Products& products, VxCtx* ctx) {
  uint8_t* base = pack_panels(products, ctx);
  const int64_t all_tiles = (int64_t)products.count * products.all.w.tiles;
  Shares shares(products, base, ctx, [=](const Part&, Work* work) {
    const int32_t panels = work->panels.count;
    const Chunks size = panels > 1 ? work->kernel->again : work->kernel->once;
    const bool grouped = size.groups(panels);
    if (grouped) work->groups = (panels + size.group_panels - 1) / size.group_panels;
    const int64_t fair = all_tiles * work->groups / (ctx->nth * size.shares);  // enough chunks for everybody
    const int64_t tiles = (int64_t)((size_t)(grouped ? size.group_bytes : size.bytes) / work->tile_bytes);
    work->tiles = (int32_t)(tiles < fair ? tiles : fair);
    if (work->tiles < 1) work->tiles = 1;
    work->items = (work->a.w.tiles + work->tiles - 1) / work->tiles * work->groups;
  });
  int32_t item = shares.next();
  while (item >= 0) {
    const Work work = shares.work;
    const int32_t begin = work.first_tile(item), last = begin + work.tiles, group = item % work.groups;
    item = shares.next();  // in time to fetch its weights
    const uint8_t* then = item < 0 ? nullptr : shares.work.tile(shares.work.first_tile(item));
    const TileRange tiles = {begin, last < work.a.w.tiles ? last : work.a.w.tiles, then,
                             work.panels.count * group / work.groups, work.panels.count * (group + 1) / work.groups};
    work.kernel->multiply(work.a, work.panels, tiles, ctx->scratch);
  }
}

// gate * sigmoid(alpha * gate) * (up + 1) within the limits, or with alpha 0 act(gate) * up; NaN stays NaN.
static F32x16 clamped(const Finish& f, F32x16 gate, F32x16 up) {
  const F32x16 most = splat(f.clamp), least = splat(-f.clamp);
  gate = select(gate > most, most, gate);
  up = select(up > most, most, select(up < least, least, up));
  if (f.alpha == 0.0f) return activate(gate, f.activation) * up;
  return gate / (splat(1.0f) + exp(gate * splat(-f.alpha))) * (up + splat(1.0f));
}

void finish_tile(const Product& a, int32_t tile, int32_t row, int32_t tokens, const float* c) {
  const VxWeight& w = a.w;
  const Finish& f = a.finish;
  const int32_t features = w.rows / 2;
  F32x16 bias[2] = {zero(), zero()};
  if (w.bias)
    for (int h = 0; h < 2; ++h) bias[h] = load(w.bias + (size_t)tile * 32 + h * 16);
  for (int32_t t = 0; t < tokens; ++t) {
    F32x16 sums[2] = {load(c + t * 32) + bias[0], load(c + t * 32 + 16) + bias[1]};
    float* y = a.y + (size_t)(row + t) * (size_t)a.stride;
    if (w.gated && f.activation != VX_NONE) {
      const int32_t left = features - tile * 16;
      const F32x16 v = f.clamp != 0.0f ? clamped(f, sums[0], sums[1]) : activate(sums[0], f.activation) * sums[1];
      store_n(y + tile * 16, v, left < 16 ? left : 16);
      continue;
    }
    for (int h = 0; h < 2; ++h) {
      const int32_t column = w.gated ? h * features + tile * 16 : tile * 32 + h * 16;
      const int32_t left = (w.gated ? (h + 1) * features : w.rows) - column;
      if (left <= 0) continue;
      if (f.activation != VX_NONE) sums[h] = activate(sums[h], f.activation);
      if (f.softcap != 0.0f) sums[h] = splat(f.softcap) * tanh(sums[h] / splat(f.softcap));
      store_n(y + column, sums[h], left < 16 ? left : 16);
    }
  }
}

}  // namespace VX_ISA
}  // namespace vx
