// A unit of attention on one thread: queries in, partition after partition, output.
#pragma once
#include "attention_cut.h"
#include "attention_heads.h"

namespace vx {
namespace VX_ISA {

// Where the queries of `attention` come from, and where its answers go.
class HeadEnds {
 public:
  HeadEnds(const VxAttention& a, const VxStep& step) : a_(a), step_(step), stride_(token_stride(a)) {}

  // The query of a head, Dp floats.
  void query(int token, int head, float* out) const {
    const float* q = a_.qkv + token * stride_ + (size_t)head * a_.head_size;
    if (token + 2 < step_.T) prefetch_head(q + 2 * stride_, a_.head_size);
    prepare_head(a_, q, a_.q_norm, rope_row(a_, step_, token), out);
  }

  // Fetches what a unit of one token begins with.
  void expect(const Share& next) const {
    const int size = a_.head_size, group = next.heads.kv_head;
    const float* token = a_.qkv + (size_t)next.tile.token * stride_;
    prefetch_head(token + (size_t)next.heads.first * size, next.heads.count * size);
    if (!a_.shared) {
      prefetch_head(token + (size_t)(a_.num_heads + group) * size, size);
      prefetch_head(token + (size_t)(a_.num_heads + a_.num_kv_heads + group) * size, size);
    }
    if (a_.rope && group == 0) {
      prefetch_head(a_.rope + (size_t)rope_row(a_, step_, next.tile.token) * a_.rotary_dim, a_.rotary_dim);
    }
  }

  // Writes a head's sums times `factor`.
  void answer(int token, int head, const float* sums, float factor) const {
    const int width = padded(a_.head_size);
    size_t index = ((size_t)token * a_.num_heads + head) * a_.head_size;
    alignas(64) float row[kMaxHeadSize];
    for (int i = 0; i < width; i += 16) store(row + i, load(sums + i) * splat(factor));
    if (turns_values(a_)) turn_head(row, a_.head_size);
    if (a_.out_dtype == VX_F32) {
      __builtin_memcpy((float*)a_.out + index, row, sizeof(float) * a_.head_size);
      return;
    }
    alignas(64) uint16_t words[kMaxHeadSize];
    for (int i = 0; i < width; i += 16) {
      a_.out_dtype == VX_BF16 ? store_bf16(words + i, load(row + i)) : store_f16(words + i, load(row + i));
    }
    __builtin_memcpy((uint16_t*)a_.out + index, words, sizeof(uint16_t) * a_.head_size);
  }

 private:
  const VxAttention& a_;
  const VxStep& step_;
  size_t stride_;
};

// One unit, or one piece of it, on one thread. Partition computes the softmax of one partition for all
// rows: attention_vectors.h, tile_attention.h, latent_partition.h.
template <class Partition, class Ends = HeadEnds>
class Worker {
 public:
  Worker(const PagedAttention& a, const VxStep& step, const Ends& ends, uint8_t* scratch)
      : a_(a), step_(step), ends_(ends), width_(padded(a.head_size)), total_acc_((float*)scratch),
        partition_(a, step, total_acc_ + kTileRows * width_) {}

  // Must come before `run_whole`, `run_piece` and `combine`.
  void begin(const Tile& tile, const Heads& heads) {
    unit_.tile = tile, unit_.heads = heads, unit_.rows = tile.tokens * heads.count;
    float prepared[kMaxHeadSize];
    partition_.begin(unit_);
    for (int r = 0; r < unit_.rows; ++r) {
      int token = tile.token + r / heads.count;
      ends_.query(token, heads.first + r % heads.count, prepared);
      partition_.set_query(r, prepared);
      unit_.visible[r] = visible_to(a_, step_, tile.row, token);
    }
  }

  // Which unit of one token comes after this one (null: unknown). What it begins with is fetched
  // meanwhile: units over short contexts would wait for memory from end to end.
  void expect(const Share* next) {
    partition_.expect(next ? &next->tile : nullptr, next ? next->heads.kv_head : 0);
    if (next) ends_.expect(*next);
  }

  // All partitions of the unit, to the output.
  void run_whole() {
    if (partitions(unit_.tile) == 1) {  // nothing to fold
      partition_.run(first_partition(unit_.tile));
      for (int r = 0; r < unit_.rows; ++r) write_row(r, partition_.state(r), partition_.sums(r));
      return;
    }
    for (int r = 0; r < unit_.rows; ++r) totals_[r] = {kFloor, 0.0f};
    __builtin_memset(total_acc_, 0, sizeof(float) * unit_.rows * width_);
    int first = first_partition(unit_.tile);
    for (int i = first; i < first + partitions(unit_.tile); ++i) {
      partition_.run(i);
      for (int r = 0; r < unit_.rows; ++r) {
        fold_partition(&totals_[r], total_acc_ + r * width_, partition_.state(r), partition_.sums(r), width_);
      }
    }
    for (int r = 0; r < unit_.rows; ++r) write_row(r, totals_[r], total_acc_ + r * width_);
  }

  // Partitions from ... to - 1 of the unit (0 = its first), each to its own states.
  void run_piece(int from, int to, float* states, size_t state_floats) {
    for (int i = from; i < to; ++i) {
      partition_.run(first_partition(unit_.tile) + i);
      for (int r = 0; r < unit_.rows; ++r) {
        float* slot = states + ((size_t)i * unit_.rows + r) * state_floats;
        RowState state = partition_.state(r);
        slot[0] = state.maximum;
        slot[1] = state.sum;
        __builtin_memcpy(slot + 16, partition_.sums(r), sizeof(float) * width_);
      }
    }
  }

  // Folds what `run_piece` left for all partitions and writes the output.
  void combine(const float* states, size_t state_floats) {
    for (int r = 0; r < unit_.rows; ++r) {
      RowState total = {kFloor, 0.0f};
      __builtin_memset(total_acc_, 0, sizeof(float) * width_);
      for (int i = 0; i < partitions(unit_.tile); ++i) {
        const float* slot = states + ((size_t)i * unit_.rows + r) * state_floats;
        fold_partition(&total, total_acc_, {slot[0], slot[1]}, slot + 16, width_);
      }
      write_row(r, total, total_acc_);
    }
  }

 private:
  void write_row(int r, RowState total, const float* acc) const {
    int token = unit_.tile.token + r / unit_.heads.count, head = unit_.heads.first + r % unit_.heads.count;
    float factor = 1.0f;
    if (a_.sinks) {
      float sink = a_.sinks[head] * kLog2e, top = sink > total.maximum ? sink : total.maximum, share;
      store_n(&factor, exp2_nonpositive(splat(total.maximum - top)), 1);
      store_n(&share, exp2_nonpositive(splat(sink - top)), 1);
      total.sum = total.sum * factor + share;
    }
    ends_.answer(token, head, acc, factor / total.sum);
  }

  const PagedAttention& a_;
  const VxStep& step_;
  Ends ends_;
  int width_;
  float* total_acc_;  // (rows, Dp) of the partitions so far
  Partition partition_;
  Unit unit_;
  RowState totals_[kTileRows];
};

// Folds what the pieces of cut units left in the workspace.
template <class Worker>
void combine(const PagedAttention& a, const VxStep& step, VxCtx* ctx, Worker* worker) {
  Tiling tiling(a, step);
  Cutter cutter(a, step, ctx->nth);
  const size_t state_floats = cutter.state_floats();
  Tile tile;
  int base = 0, taken = vx_next(ctx);
  while (tiling.next(&tile)) {
    Cut cut = cutter.cut(tile);
    if (cut.pieces == 1) continue;
    for (; taken < base + tiling.units(); taken = vx_next(ctx)) {
      int unit = taken - base;
      size_t first_state = cut.workspace_state + unit * tiling.unit_states(tile);
      worker->begin(tile, tiling.unit_heads(unit));
      worker->combine((float*)a.workspace + first_state * state_floats, state_floats);
    }
    base += tiling.units();
  }
}

// A share's partitions: to the output, or where it is a piece to the workspace.
template <class Worker>
VX_INLINE void run_share(const VxAttention& a, const Share& share, size_t state_floats, Worker* worker) {
  if (share.cut.pieces == 1) return worker->run_whole();
  int from = share.piece * share.cut.piece_partitions;
  int to = minimum(from + share.cut.piece_partitions, partitions(share.tile));
  worker->run_piece(from, to, (float*)a.workspace + share.first_state * state_floats, state_floats);
}

}  // namespace VX_ISA
}  // namespace vx
