// VX: per instruction set
// Which tokens each query attends to: keys into the pages, scores of heads with positions as lanes, and the
// best of them. A score is one chain of multiply-adds for each head and a sum over heads in ascending order,
// so it does not depend on what is computed next to it.
#include "indexer.h"

#include "attention_heads.h"
#include "latent_partition.h"
#include "row_loops.h"

namespace vx {
namespace VX_ISA {
namespace {

constexpr int kSpan = 8 * kChunk;  // positions of a unit
constexpr int kUnitTokens = 8;

// Tokens first ... first + tokens - 1 of a step, all of one row, of which the last one sees `end` positions.
struct Run {
  int row, first, tokens, end;
};

void rotate(const VxIndexer& a, float* x, int32_t position) {
  if (a.ratio > 1) x += a.head_size - a.rotary_dim;
  const float* table = a.rope + (size_t)position * a.rotary_dim;
  a.interleaved ? rotate_pairs(x, table, a.rotary_dim) : rotate_halves(x, table, a.rotary_dim);
}

// Tokens, or entries that have ended.
int32_t seen(const VxIndexer& a, int32_t position) { return (position + 1) / a.ratio; }

template <class Keys>
class Scorer {
  typedef typename Keys::Pages Pages;
  typedef typename Pages::Operand Operand;
  typedef typename Pages::Cell Cell;

 public:
  Scorer(const VxIndexer& a, const VxStep& step, uint8_t* room)
      : a_(a), step_(step), paged_(pages_of(a)), q_stride_(padded(a.head_size) / Pages::per_cell), keys_((Cell*)room),
        chunk_room_(keys_ + (size_t)q_stride_ * kChunk), q_((Operand*)(chunk_room_ + (size_t)q_stride_ * kChunk)),
        chunk_(paged_, step_, chunk_room_) {}
  Scorer(const Scorer&) = delete;

  static int unit_tokens(const VxIndexer& a) {
    const int fit = IndexerRoom::BYTES / (a.num_heads * padded(a.head_size) * 4);
    return fit < 1 ? 1 : minimum(fit, kUnitTokens);
  }

  void begin(const Run& run) {
    run_ = run;
    float q[kMaxHeadSize];
    for (int r = 0; r < run.tokens * a_.num_heads; ++r) {
      const int token = run.first + r / a_.num_heads;
      __builtin_memset(q, 0, padded(a_.head_size) * sizeof *q);
      __builtin_memcpy(q, a_.q + ((size_t)run.first * a_.num_heads + r) * a_.head_size, a_.head_size * sizeof *q);
      rotate(a_, q, step_.positions[token]);
      for (int i = 0; i < padded(a_.head_size); i += 16)
        Pages::store_operand(q_ + (size_t)r * q_stride_, i, load(q + i));
    }
  }

  // Scores of positions start ... start + kChunk - 1 for all tokens of the run; `scores` are the first one's.
  void run(int start, float* scores) {
    const Tile tile = {run_.row, run_.first, run_.tokens, {0, run_.end}};
    chunk_.find(tile, start);
    chunk_.keys(0, q_stride_, keys_);
    for (int t = 0; t < run_.tokens; ++t) {
      const float* weights = a_.weights + (size_t)(run_.first + t) * a_.num_heads;
      F32x16 total[kChunkGroups];
      for (int g = 0; g < kChunkGroups; ++g) total[g] = zero();
      for (int h = 0; h < a_.num_heads; h += kRowBlock) {
        const Operand* q = q_ + ((size_t)t * a_.num_heads + h) * q_stride_;
        const int rows = minimum(kRowBlock, a_.num_heads - h);
        alignas(64) float sums[kRowBlock * kChunk] = {};
        switch (rows) {
          case 1: add_scores<Pages, 1>(q, q_stride_, keys_, q_stride_, sums); break;
          case 2: add_scores<Pages, 2>(q, q_stride_, keys_, q_stride_, sums); break;
          case 3: add_scores<Pages, 3>(q, q_stride_, keys_, q_stride_, sums); break;
          default: add_scores<Pages, kRowBlock>(q, q_stride_, keys_, q_stride_, sums);
        }
        for (int r = 0; r < rows; ++r)
          for (int g = 0; g < kChunkGroups; ++g) {
            const F32x16 s = load(sums + r * kChunk + g * kGroup);
            total[g] = fma(splat(weights[h + r]), select(s < zero(), zero(), s), total[g]);  // NaN stays
          }
      }
      float* out = scores + (size_t)t * a_.stride + start;
      for (int g = 0; g < kChunkGroups; ++g) store(out + g * kGroup, total[g]);
    }
  }

 private:
  // Keys look like latents without a rotated part.
  static PagedAttention pages_of(const VxIndexer& a) {
    PagedAttention pages = {};
    pages.head_size = a.head_size, pages.block_size = a.block_size, pages.k_pages = a.pages;
    return pages;
  }

  const VxIndexer& a_;
  const VxStep& step_;
  PagedAttention paged_;
  int q_stride_;
  Cell *keys_, *chunk_room_;  // an operand and rows of kChunk positions
  Operand* q_;                // (tokens, H, D)
  LatentChunk<Keys> chunk_;
  Run run_ = {};
};

// A float's bits as a number that grows with it; NaN is the lowest.
VX_INLINE uint32_t in_order(float x) {
  x += 0.0f;  // -0 is 0
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  if (x != x) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The `count` best of n > count scores, by position; the first of equal ones. Their bits replace the scores.
void pick(float* scores, int32_t n, int32_t count, int32_t* out) {
  uint32_t* bits = (uint32_t*)scores;
  for (int32_t i = 0; i < n; ++i) {
    const uint32_t one = in_order(scores[i]);
    __builtin_memcpy(bits + i, &one, sizeof one);
  }
  uint32_t threshold = 0, decided = 0;  // leading bits of the last one that is picked, and which are known
  int32_t left = count;                 // of those that begin with `threshold`, so many are picked
  for (int shift = 22; ; shift = shift > 11 ? 11 : 0) {
    const uint32_t mask = shift == 22 ? 1023 : 2047;
    int32_t counts[2048] = {};
    for (int32_t i = 0; i < n; ++i)
      if ((bits[i] & decided) == threshold) ++counts[bits[i] >> shift & mask];
    uint32_t digit = mask;
    while (counts[digit] < left) left -= counts[digit--];
    threshold |= digit << shift, decided |= mask << shift;
    if (shift == 0) break;
  }
  for (int32_t i = 0, found = 0; found < count; ++i)
    if (bits[i] > threshold || (bits[i] == threshold && left-- > 0)) out[found++] = i;
}

template <class Keys>
void write_keys(const VxIndexer& a, const VxStep& step, VxCtx* ctx) {
  for_rows(&step, ctx, [&](int32_t token) {
    float row[kMaxHeadSize];
    __builtin_memcpy(row, a.key + (size_t)token * a.head_size, a.head_size * sizeof *row);
    rotate(a, row, step.positions[token]);
    typename Keys::Item* page =
        (typename Keys::Item*)a.pages + (size_t)step.slots[(size_t)a.group * step.T + token] * a.head_size;
    for_lanes(a.head_size, [&](int32_t i, int n) { Keys::write(page, i, load_some(row + i, n), n); });
  });
}

// Scores of the tokens first ... last - 1 of a step that do not see few enough to pick all.
template <class Keys>
void score(const VxIndexer& a, const VxStep& step, int first, int last, VxCtx* ctx) {
  VxStep own = step;
  own.block_tables += (size_t)a.group * step.R * step.block_stride;
  Scorer<Keys> scorer(a, own, ctx->scratch);
  const int most = Scorer<Keys>::unit_tokens(a);
  int row = 0, base = 0, taken = vx_next(ctx);
  for (int token = first; token < last;) {
    while (step.query_start[row + 1] <= token) ++row;
    const int tokens = minimum(most, minimum(last, step.query_start[row + 1]) - token);
    const Run run = {row, token, tokens, seen(a, step.positions[token + tokens - 1])};
    float* scores = (float*)a.workspace + (size_t)(token - first) * a.stride;
    token += tokens;
    if (run.end <= a.picked) continue;
    const int spans = ceil_div(run.end, kSpan);
    for (bool begun = false; taken < base + spans; taken = vx_next(ctx), begun = true) {
      if (!begun) scorer.begin(run);
      const int start = (taken - base) * kSpan, end = minimum(start + kSpan, run.end);
      for (int at = start; at < end; at += kChunk) scorer.run(at, scores);
    }
    base += spans;
  }
}

template <class Keys>
void run(const VxIndexer& a, const VxStep& step, VxCtx* ctx) {
  if (a.key) write_keys<Keys>(a, step, ctx);
  for (int first = 0; first < step.T; first += IndexerRoom::TOKENS) {
    const int last = minimum(step.T, first + IndexerRoom::TOKENS);
    vx_barrier(ctx);
    score<Keys>(a, step, first, last, ctx);
    vx_barrier(ctx);
    for (int token; (token = first + vx_next(ctx)) < last;) {
      int32_t* out = a.out + (size_t)token * a.picked;
      const int32_t count = seen(a, step.positions[token]);
      if (count > a.picked) {
        pick((float*)a.workspace + (size_t)(token - first) * a.stride, count, a.picked, out);
      } else {
        for (int32_t i = 0; i < a.picked; ++i) out[i] = i < count ? i : -1;
      }
    }
  }
}

}  // namespace

void indexer(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxIndexer& a = *(const VxIndexer*)args;
  switch (a.kv_dtype) {
    case VX_BF16: return run<Bf16Latents>(a, *step, ctx);
    case VX_F16: return run<F16Latents>(a, *step, ctx);
    default: return run<F32Latents>(a, *step, ctx);
  }
}
VX_OP(indexer, VxIndexer)

}  // namespace VX_ISA
}  // namespace vx
