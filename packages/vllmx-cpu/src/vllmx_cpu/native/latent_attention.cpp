// VX: per instruction set
// Latent attention: rows into the pages, queries through k_b, units of many heads over the same rows, and
// what they found through v_b. A step goes through in parts of tokens, so that what lies between stays small.
#include "latent_attention.h"

#include "attention_unit.h"
#include "latent_partition.h"
#include "products.h"
#include "row_loops.h"

namespace vx {
namespace VX_ISA {
namespace {

// What all threads know of the tokens that go through together.
struct Pass {
  const VxLatentAttention& a;
  VxStep step;             // of these tokens alone
  VxStep seen;             // what they attend to: the step, or a row for each token whose pages have one position
  PagedAttention attention;   // one key for all heads, with the rank as its size; what is not used is 0
  float *heads, *found;    // LatentRoom
  int32_t starts[LatentRoom::TOKENS + 1], singles[LatentRoom::TOKENS + 1], last[LatentRoom::TOKENS];
  int32_t* slots;          // (tokens, num_picked)

  // Tokens first ... first + tokens - 1 of a step.
  Pass(const VxLatentAttention& args, const VxStep& all, int32_t first, int32_t tokens)
      : a(args), step(all), attention() {
    const LatentRoom room(a.num_heads, a.rank, a.nope_size, a.value_size, a.num_picked);
    uint8_t* workspace = (uint8_t*)a.workspace;
    heads = (float*)(workspace + room.heads), found = (float*)(workspace + room.found);
    int32_t row = 0;
    while (all.query_start[row + 1] <= first) ++row;
    step.T = tokens, step.R = 0;
    step.positions += first;
    step.slots += (size_t)a.group * all.T + first;
    step.context_len += row;
    step.block_tables += ((size_t)a.group * all.R + row) * all.block_stride;
    step.query_start = starts;
    starts[0] = 0;
    while (starts[step.R] < tokens) {
      const int32_t end = all.query_start[row + ++step.R] - first;
      starts[step.R] = end < tokens ? end : tokens;
    }
    attention.num_heads = a.num_heads, attention.num_kv_heads = 1;
    attention.head_size = a.rank, attention.rotary_dim = a.rotary_dim;
    attention.block_size = a.block_size, attention.kv_dtype = a.kv_dtype;
    attention.causal = 1, attention.scale = a.scale;
    attention.k_pages = a.pages;
    attention.workspace = workspace + room.states;
    attention.workspace_bytes = a.workspace_bytes > room.states ? a.workspace_bytes - room.states : 0;
    slots = (int32_t*)(workspace + room.picked);
    seen = step;
    if (a.picked) see_picked();
  }
  Pass(const Pass&) = delete;

  const float* query(int32_t token, int32_t head) const {
    return a.q + ((size_t)token * a.num_heads + head) * (a.nope_size + a.rotary_dim);
  }
  float* row(float* base, int32_t token, int32_t head, int32_t size) const {
    return base + ((size_t)head * step.T + token) * size;
  }

 private:
  void see_picked() {
    for (int32_t token = 0; token < step.T; ++token) {
      const int32_t position = step.positions[token];
      singles[token] = token, last[token] = position < a.num_picked ? position : a.num_picked - 1;
    }
    singles[step.T] = seen.R = step.T;
    seen.query_start = singles, seen.positions = last;
    seen.block_tables = slots, seen.block_stride = a.num_picked;
    attention.block_size = 1;
  }
};

// The slots of the positions that the tokens attend to.
void find_slots(const Pass& pass, int32_t token) {
  const VxLatentAttention& a = pass.a;
  int32_t row = 0;
  while (pass.starts[row + 1] <= token) ++row;
  const int32_t* table = pass.step.block_tables + (size_t)row * pass.step.block_stride;
  const int32_t* picked = a.picked + (size_t)token * a.num_picked;
  int32_t* slots = pass.slots + (size_t)token * a.num_picked;
  for (int32_t i = 0; i <= pass.last[token]; ++i)
    slots[i] = table[picked[i] / a.block_size] * a.block_size + picked[i] % a.block_size;
}

void rotate(const Pass& pass, float* x, int32_t token) {
  const VxLatentAttention& a = pass.a;
  const float* table = a.rope + (size_t)pass.step.positions[token] * a.rotary_dim;
  a.interleaved ? rotate_pairs(x, table, a.rotary_dim) : rotate_halves(x, table, a.rotary_dim);
}

// Each token's row into its page, and the parts of its queries that meet the latents head by head.
template <class Latents>
void prepare(const Pass& pass, const float* latent, VxCtx* ctx) {
  const VxLatentAttention& a = pass.a;
  const int32_t size = a.rank + a.rotary_dim;
  for_rows(&pass.step, ctx, [&](int32_t token) {
    float row[kMaxHeadSize];
    const float* x = latent + (size_t)token * size;
    norm_head(x, a.norm, a.norm_eps, a.rank, row);
    __builtin_memcpy(row + a.rank, x + a.rank, a.rotary_dim * sizeof *row);
    rotate(pass, row + a.rank, token);
    typename Latents::Item* page = (typename Latents::Item*)a.pages + (size_t)pass.step.slots[token] * size;
    for_lanes(size, [&](int32_t i, int n) { Latents::write(page, i, load_some(row + i, n), n); });
    for (int32_t head = 0; head < a.num_heads; ++head)
      __builtin_memcpy(pass.row(pass.heads, token, head, a.nope_size), pass.query(token, head),
                       a.nope_size * sizeof(float));
    if (a.picked) find_slots(pass, token);
  });
}

// Where the queries of a pass are, and where what they find goes.
class LatentEnds {
 public:
  explicit LatentEnds(const Pass& pass) : pass_(pass) {}
  void query(int token, int head, float* out) const {
    const VxLatentAttention& a = pass_.a;
    __builtin_memcpy(out, pass_.row(pass_.found, token, head, a.rank), a.rank * sizeof *out);
    __builtin_memcpy(out + a.rank, pass_.query(token, head) + a.nope_size, a.rotary_dim * sizeof *out);
    rotate(pass_, out + a.rank, token);
    const int size = a.rank + a.rotary_dim;
    for (int i = size; i < padded(size); ++i) out[i] = 0.0f;
  }
  void expect(const Share&) const {}
  void answer(int token, int head, const float* sums, float factor) const {
    float* out = pass_.row(pass_.found, token, head, pass_.a.rank);
    for_lanes(pass_.a.rank, [=](int32_t i, int n) { store_some(out + i, load(sums + i) * splat(factor), n); });
  }

 private:
  const Pass& pass_;
};

template <class Latents>
void attend(const Pass& pass, VxCtx* ctx) {
  const PagedAttention& a = pass.attention;
  Worker<LatentPartition<Latents>, LatentEnds> worker(a, pass.seen, LatentEnds(pass), ctx->scratch);
  Shares shares(a, pass.seen, ctx->nth);
  for (Share share; shares.find(vx_next(ctx), &share);) {
    worker.begin(share.tile, share.heads);
    run_share(a, share, shares.cutter.state_floats(), &worker);
  }
  if (!shares.cutter.any()) return;
  vx_barrier(ctx);
  combine(a, pass.seen, ctx, &worker);
}

// The matrix of each head times its tokens.
void multiply(const Pass& pass, const VxWeight& w, const float* x, float* y, VxCtx* ctx) {
  const int32_t tokens = pass.step.T, heads = pass.a.num_heads;
  Part parts[LatentRoom::HEADS];
  for (int32_t head = 0; head < heads; ++head) parts[head] = {head, head * tokens, tokens, 0, false};
  const Product product = {w, {VX_NONE, 0.0f, 0.0f, 1.0f}, x, nullptr, heads * tokens, y, w.rows};
  run_products({product, pass.a.panels, parts, heads}, ctx);
  vx_barrier(ctx);
}

template <class Latents>
void run(const VxLatentAttention& a, const VxStep& step, VxCtx* ctx) {
  for (int32_t first = 0; first < step.T; first += LatentRoom::TOKENS) {
    const int32_t left = step.T - first, tokens = left < LatentRoom::TOKENS ? left : LatentRoom::TOKENS;
    VxLatentAttention part = a;
    part.q += (size_t)first * a.num_heads * (a.nope_size + a.rotary_dim);
    if (a.picked) part.picked += (size_t)first * a.num_picked;
    const Pass pass(part, step, first, tokens);
    prepare<Latents>(pass, a.latent + (size_t)first * (a.rank + a.rotary_dim), ctx);
    vx_barrier(ctx);
    multiply(pass, a.k_b, pass.heads, pass.found, ctx);
    attend<Latents>(pass, ctx);
    vx_barrier(ctx);
    multiply(pass, a.v_b, pass.found, pass.heads, ctx);
    for_rows(&pass.step, ctx, [&](int32_t token) {
      float* out = a.out + (size_t)(first + token) * a.num_heads * a.value_size;
      for (int32_t head = 0; head < a.num_heads; ++head)
        __builtin_memcpy(out + (size_t)head * a.value_size, pass.row(pass.heads, token, head, a.value_size),
                         a.value_size * sizeof(float));
    });
    if (first + tokens < step.T) vx_barrier(ctx);
  }
}

}  // namespace

void latent_attention(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxLatentAttention& a = *(const VxLatentAttention*)args;
  switch (a.kv_dtype) {
    case VX_BF16: return run<Bf16Latents>(a, *step, ctx);
    case VX_F16: return run<F16Latents>(a, *step, ctx);
    default: return run<F32Latents>(a, *step, ctx);
  }
}
VX_OP(latent_attention, VxLatentAttention)

}  // namespace VX_ISA
}  // namespace vx
