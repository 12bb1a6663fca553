// VX: per instruction set
// The sampler op: a row from logits to id, phase by phase, by one thread or by all of them.
#include "sampler.h"

#include "sampler_select.h"

namespace vx {
namespace VX_ISA {
namespace {

struct Top {
  float greatest, least;
  bool broken;  // NaN seen

  bool usable() const { return !broken && greatest > -kInfinity && greatest < kInfinity; }
};

// One row at a time. Every thread of the crew calls the same functions; what `meet` separates is
// published before and read after. No array is published twice in a row without another meeting.
class RowSampler {
 public:
  // Part `part` of the `parts` threads that share each row; slot: of the workspace, where they meet.
  RowSampler(const VxSampler& a, const VxStep& step, VxCtx* ctx, int part, int parts, int slot)
      : a_(a), step_(step), ctx_(ctx), part_(part), parts_(parts) {
    int slices = (int)sampler_slices(a.vocab_size);
    begin_ = (int)((int64_t)slices * part / parts);
    end_ = (int)((int64_t)slices * (part + 1) / parts);
    slices_ = slices;
    SamplerArrays unused;
    slot_bytes_ = carve_sampler_slot(nullptr, a.vocab_size, &shared_, &unused);
    base_ = (uint8_t*)a.workspace + slot * slot_bytes_;
    carve_sampler_slot(base_, a.vocab_size, &shared_, &arrays_);
    own_ = slot_of(part);
  }

  void run(int row) {
    row_ = row;
    raw_ = a_.logits + (size_t)row * a_.vocab_size;
    Top top = find_top(raw_, arrays_.extremes[0]);
    int id = -1;
    if (!top.broken && top.greatest < kInfinity) id = a_.target[row] >= 0 ? a_.target[row] : pick(top);
    if (leads()) a_.ids[row] = id;
    if (a_.max_logprobs >= 0) report(id, top);
    if (a_.whole_index && a_.whole_index[row] >= 0) copy_whole(a_.whole_index[row]);
    meet();
  }

 private:
  bool leads() const { return part_ == 0; }
  void meet() const {
    if (parts_ > 1) vx_barrier(ctx_);
  }
  SamplerSlot* slot_of(int part) const { return (SamplerSlot*)(base_ + part * slot_bytes_); }
  int slice_length(int slice) const {
    int left = a_.vocab_size - slice * kSlice;
    return left < kSlice ? left : kSlice;
  }
  double total(const double* mass) const {
    double sum = 0;
    for (int s = 0; s < slices_; ++s) sum += mass[s];
    return sum;
  }

  Top find_top(const float* logits, SamplerExtremes* extremes) const {
    for (int s = begin_; s < end_; ++s) extremes[s] = scan_extremes(logits + s * kSlice, slice_length(s));
    meet();
    Top top = {-kInfinity, kInfinity, false};
    for (int s = 0; s < slices_; ++s) {
      if (extremes[s].greatest > top.greatest) top.greatest = extremes[s].greatest;
      if (extremes[s].least < top.least) top.least = extremes[s].least;
      top.broken |= extremes[s].broken != 0;
    }
    return top;
  }

  int first_id(const float* logits, float value) const {
    for (int s = 0; s < slices_; ++s) {
      int n = slice_length(s), found = find_first(logits + s * kSlice, n, value);
      if (found < n) return s * kSlice + found;
    }
    return -1;
  }

  int pick(Top top) {
    const float* logits = raw_;
    if (is_edited()) {
      edit();
      logits = arrays_.edited;
      top = find_top(logits, arrays_.extremes[1]);
    }
    if (!top.usable()) return -1;
    return a_.temperature[row_] == 0.0f ? first_id(logits, top.greatest) : draw(logits, top);
  }

  // --- mask, edits, penalties ----------------------------------------------------------------------
  bool is_masked() const { return a_.mask_index && a_.mask_index[row_] >= 0; }
  int group() const { return a_.group_from ? a_.group_from[row_] : -1; }
  bool is_edited() const {
    bool listed = a_.edit_start && a_.edit_start[row_ + 1] > a_.edit_start[row_];
    bool counted = a_.count_start && (a_.count_start[row_ + 1] > a_.count_start[row_] || a_.pending[row_]);
    bool penalised = a_.repetition_penalty[row_] != 1.0f || a_.frequency_penalty[row_] != 0.0f ||
                     a_.presence_penalty[row_] != 0.0f;
    return is_masked() || listed || (counted && penalised) || group() >= 0;
  }

  void edit() {
    size_t words = ((size_t)a_.vocab_size + 31) / 32;
    const uint32_t* mask = is_masked() ? a_.masks + a_.mask_index[row_] * words : nullptr;
    for (int s = begin_; s < end_; ++s) {
      copy_masked(raw_ + s * kSlice, slice_length(s), mask ? mask + s * kSlice / 32 : nullptr,
                  arrays_.edited + s * kSlice);
    }
    meet();
    if (leads()) {
      if (a_.edit_start) {
        for (int i = a_.edit_start[row_]; i < a_.edit_start[row_ + 1]; ++i) {
          arrays_.edited[a_.edit_ids[i]] += a_.edit_values[i];
        }
      }
      if (a_.count_start) penalise();
      if (group() >= 0) choose_group(group());
    }
    meet();
  }

  // Ids from `first` on are one choice: likelier than any other, it takes the others out.
  void choose_group(int first) {
    float* logits = arrays_.edited;
    float top = -kInfinity, mass = 0;
    for (int id = 0; id < first; ++id) top = logits[id] > top ? logits[id] : top;
    for (int id = first; id < a_.vocab_size; ++id) mass += std::exp(logits[id] - top);
    if (!(mass > 1)) return;
    for (int id = 0; id < first; ++id) logits[id] = -kInfinity;
  }

  void penalise() {
    int pending = a_.pending[row_] ? step_.tokens[step_.logit_rows[row_]] : -1;
    for (int i = a_.count_start[row_]; i < a_.count_start[row_ + 1]; ++i) {
      bool fed = a_.count_ids[i] == pending;
      penalise_id(a_.count_ids[i], a_.output_counts[i] + fed);
      if (fed) pending = -1;
    }
    if (pending >= 0) penalise_id(pending, 1);
  }

  void penalise_id(int id, int count) {
    float& logit = arrays_.edited[id];
    float factor = a_.repetition_penalty[row_];
    logit = logit > 0 ? logit / factor : logit * factor;
    logit -= a_.frequency_penalty[row_] * (float)count;
    logit -= count > 0 ? a_.presence_penalty[row_] : 0.0f;
  }

  // --- the draw --------------------------------------------------------------------------------------
  int draw(const float* logits, const Top& top) {
    Tempering t = {top.greatest, a_.temperature[row_], -kInfinity};
    if (a_.min_p[row_] > 0) t.cut = (float)std::log((double)a_.min_p[row_]);
    bool ranked = a_.top_k[row_] > 0 && a_.top_k[row_] < a_.vocab_size;
    if (ranked || a_.top_p[row_] < 1.0f) t.cut = filter(logits, top, t, ranked);

    uint64_t seed = a_.seed[row_];
    uint32_t position = (uint32_t)a_.position[row_];
    int likeliest = first_id(logits, top.greatest);
    alignas(64) float gumbel[kNoiseBlock];
    store_gumbel(noise_words(seed, position, (uint32_t)(likeliest / kNoiseBlock * kNoiseBlock)), gumbel);
    float known_score = gumbel[likeliest % kNoiseBlock];  // its tempered logit is 0
    SamplerWinner winner = {-kInfinity, -1};
    for (int s = begin_; s < end_; ++s) {
      draw_slice(logits + s * kSlice, s * kSlice, slice_length(s), t, seed, position, known_score, &winner);
    }
    if (parts_ == 1) return winner.id;
    own_->winner = winner;
    meet();
    winner = shared_->winner;
    for (int part = 1; part < parts_; ++part) {
      if (slot_of(part)->winner.score > winner.score) winner = slot_of(part)->winner;
    }
    return winner.id;
  }

  // The tempered logit from which top_k and top_p keep ids.
  float filter(const float* logits, const Top& top, Tempering t, bool ranked) {
    float range = (top.greatest - top.least) / t.temperature;
    float scale = range > 0 ? (kBins - 1) / (range < 32.0f ? range : 32.0f) : 1.0f;
    count(logits, t, scale);
    double mass = total(arrays_.mass[0]);
    if (ranked) {
      int rank = 0;
      if (leads()) {
        RankedBin found = find_rank(shared_->histogram, a_.top_k[row_]);
        shared_->decisions[0] = found.bins;
        rank = found.rank;
      }
      meet();
      SamplerDecision bins = shared_->decisions[0];
      if (bins.first <= bins.last) {
        collect(logits, t, scale, bins);
        if (leads()) {
          int collected = gather();
          float value = select_rank(arrays_.values, collected, rank);
          trim_histogram(shared_->histogram, bins.first, arrays_.values, collected, value);
          shared_->decisions[1].cut = value;
        }
        meet();
        t.cut = shared_->decisions[1].cut;
        if (a_.top_p[row_] < 1.0f) mass = mass_left(logits, t);
      }
    }
    return a_.top_p[row_] < 1.0f ? cut_mass(logits, t, scale, (double)a_.top_p[row_] * mass) : t.cut;
  }

  // Masses of the slices, and in the shared histogram all parts' counts.
  void count(const float* logits, const Tempering& t, float scale) {
    __builtin_memset(own_->histogram, 0, sizeof own_->histogram);
    for (int s = begin_; s < end_; ++s) {
      arrays_.mass[0][s] = sum_mass_and_count(logits + s * kSlice, slice_length(s), t, scale, own_->histogram);
    }
    meet();
    if (!leads()) return;
    for (int part = 1; part < parts_; ++part) {
      for (int bin = 0; bin < kBins; ++bin) shared_->histogram[bin] += slot_of(part)->histogram[bin];
    }
  }

  double mass_left(const float* logits, const Tempering& t) const {
    for (int s = begin_; s < end_; ++s) {
      arrays_.mass[1][s] = sum_mass(logits + s * kSlice, slice_length(s), t);
    }
    meet();
    return total(arrays_.mass[1]);
  }

  float cut_mass(const float* logits, const Tempering& t, float scale, double target) {
    if (leads()) shared_->decisions[2] = find_mass(shared_->histogram, scale, target);
    meet();
    collect(logits, t, scale, shared_->decisions[2]);
    if (leads()) {
      int collected = gather();
      shared_->decisions[3].cut = select_mass(arrays_.values, collected, total(arrays_.mass[2]), target);
    }
    meet();
    return shared_->decisions[3].cut;
  }

  void collect(const float* logits, const Tempering& t, float scale, SamplerDecision bins) {
    for (int s = begin_; s < end_; ++s) {
      arrays_.collected[s] = collect_bins(logits + s * kSlice, slice_length(s), t, scale, bins.first, bins.last,
                                          arrays_.values + s * kSlice, &arrays_.mass[2][s]);
    }
    meet();
  }

  // Moves what the slices collected together; returns how many there are.
  int gather() {
    int count = 0;
    for (int s = 0; s < slices_; ++s) {
      __builtin_memmove(arrays_.values + count, arrays_.values + s * kSlice, arrays_.collected[s] * sizeof(float));
      count += arrays_.collected[s];
    }
    return count;
  }

  // --- logprobs --------------------------------------------------------------------------------------
  void report(int id, const Top& top) {
    bool wanted = a_.num_logprobs[row_] >= 0 && id >= 0;
    int width = wanted ? a_.num_logprobs[row_] : 0;
    if (wanted) {
      Tempering t = {top.greatest, 1.0f, -kInfinity};
      own_->greater = own_->listed = own_->taken = 0;
      for (int s = begin_; s < end_; ++s) {
        const float* logits = raw_ + s * kSlice;
        arrays_.mass[0][s] = sum_mass(logits, slice_length(s), t);
        own_->greater += count_greater(logits, slice_length(s), raw_[id]);
        if (width > 0) list_likeliest(logits, s * kSlice, slice_length(s), width, own_);
      }
      meet();
    }
    if (!leads()) return;
    a_.chosen[row_] = -kInfinity;
    a_.rank[row_] = 0;
    int* top_ids = a_.top_ids + (size_t)row_ * a_.max_logprobs;
    float* top_values = a_.top + (size_t)row_ * a_.max_logprobs;
    for (int i = 0; i < a_.max_logprobs; ++i) top_ids[i] = -1, top_values[i] = -kInfinity;
    if (!wanted) return;
    double log_mass = (double)top.greatest + std::log(total(arrays_.mass[0]));
    a_.chosen[row_] = (float)((double)raw_[id] - log_mass);
    a_.rank[row_] = 1;
    for (int part = 0; part < parts_; ++part) a_.rank[row_] += slot_of(part)->greater;
    for (int i = 0; i < width; ++i) {
      SamplerWinner next = take_likeliest();
      if (next.id < 0) break;
      top_ids[i] = next.id;
      top_values[i] = (float)((double)next.score - log_mass);
    }
  }

  void copy_whole(int index) const {
    float* to = a_.whole + (size_t)index * a_.vocab_size;
    for (int s = begin_; s < end_; ++s) {
      __builtin_memcpy(to + s * kSlice, raw_ + s * kSlice, slice_length(s) * sizeof(float));
    }
  }

  // The best of what the parts have listed and nobody has taken; id -1 when nothing is left. Parts are
  // in the order of ids, so the first of equals has the lowest.
  SamplerWinner take_likeliest() const {
    SamplerSlot* best = nullptr;
    for (int part = 0; part < parts_; ++part) {
      SamplerSlot* slot = slot_of(part);
      if (slot->taken == slot->listed) continue;
      if (!best || slot->listing[slot->taken].score > best->listing[best->taken].score) best = slot;
    }
    return best ? best->listing[best->taken++] : SamplerWinner{-kInfinity, -1};
  }

  const VxSampler& a_;
  const VxStep& step_;
  VxCtx* ctx_;
  int part_, parts_, slices_, begin_, end_;  // slices begin ... end - 1 are this part's
  size_t slot_bytes_;
  uint8_t* base_;
  SamplerSlot *shared_, *own_;
  SamplerArrays arrays_;
  int row_;
  const float* raw_;
};

}  // namespace

void sample(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxSampler& a = *(const VxSampler*)args;
  if (ctx->nth > 1 && 2 * step->L <= ctx->nth) {
    RowSampler together(a, *step, ctx, ctx->tid, ctx->nth, 0);
    for (int row = 0; row < step->L; ++row) together.run(row);
    return;
  }
  RowSampler alone(a, *step, ctx, 0, 1, ctx->tid);
  for (int32_t row; (row = vx_next(ctx)) < step->L;) alone.run(row);
}
VX_OP(sample, VxSampler)

}  // namespace VX_ISA
}  // namespace vx
