// VX: per instruction set
// Between the ranks of a model, each a process with a team of its own: sums and gathers through memory
// that all share (vllmx_core.communicator.SharedAddresses).
//
// A rank puts its part down in its buffer of this turn, says that it has arrived, waits until all have
// as well, and adds all parts in one order, so that every rank has the same bits. There
// are two buffers a rank: who writes part n + 2 has seen all others arrive with part n + 1, and they
// had read part n by then. Of two ranks each writes part n + 2 where it has read the other's part n, so that
// a line of memory, which comes over to be read, need not be asked back to be written
// (vllmx_tp.region.Region.part). Long arrays go in pieces of a buffer. When the abort word is set nobody
// waits any more; what comes out then is thrown away by whoever reads the step.
#include <string.h>

#include "futex.h"
#include "row_loops.h"

namespace vx {
namespace VX_ISA {

struct VxRanks {
  const uint32_t* abort;
  uint8_t* arrived;        // of each rank ArrivedWords
  uint8_t* buffers;        // two of buffer_bytes for each rank
  uint32_t* count;         // calls so far, this process's own
  size_t arrived_stride, buffer_bytes;
  int32_t rank, ranks;
};

// What a rank says of itself (vllmx_tp.region).
struct ArrivedWords {
  uint32_t count;          // calls that it has begun
  uint32_t sleepers;       // who sleep for `count`
  uint32_t bytes[2];       // of its part of each turn, for ranks of other hosts
  uint32_t bridged;        // not zero: a link to another host sleeps for `count`
};

struct VxAllReduce {
  VxRanks all;
  const float* x;          // (T, width)
  float* y;                // (T, width)
  int32_t width;
};

struct VxWire {
  const uint32_t* abort;
  uint32_t* arrived;       // of the rank that sends: ArrivedWords
  uint32_t* taken;         // of the rank that receives: pieces that it needs no more, then who sleep for it
  uint8_t* buffers;        // two of the rank that sends
  uint32_t* count;         // pieces so far, this process's own
  const uint32_t* bridged; // not zero: a link to another host sleeps for this rank's words
  float* x;                // (T, width)
  size_t buffer_bytes;
  int32_t width;
};

struct VxAllGather {
  VxRanks all;
  const float* x;          // (L, widths[rank])
  float* y;                // (L, sum of widths)
  const int32_t* widths;   // (ranks)
};

namespace {

enum : int64_t { SPIN_NS = 100000, SLEEP_NS = 20000000 };
enum { CHUNK = 4096 };  // floats that a thread takes at once
enum : size_t { CLAIMED_AHEAD = 256 };  // floats: more lines than a core can ask for at once
enum : size_t { NEAR_BYTES = 256 << 10 };

VX_INLINE uint32_t* arrived_word(const VxRanks* all, int32_t rank) {
  return (uint32_t*)(all->arrived + (size_t)rank * all->arrived_stride);
}

VX_INLINE float* part_of(const VxRanks* all, int32_t rank, uint32_t count) {
  const int32_t seat = all->ranks == 2 ? rank ^ (int32_t)(count >> 1 & 1) : rank;
  return (float*)(all->buffers + (2 * (size_t)seat + (count & 1)) * all->buffer_bytes);
}

VX_INLINE bool has_come(const uint32_t* word, uint32_t count) {
  return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - count) >= 0;
}

// Until the word has come to `count`: spins, then sleeps in slices, so that the abort word is seen.
void wait_for(uint32_t* word, uint32_t count, const uint32_t* abort) {
  const int64_t end = now_ns() + SPIN_NS;
  while (!has_come(word, count)) {
    if (__atomic_load_n(abort, __ATOMIC_RELAXED)) return;
    if (now_ns() < end) {
      for (int i = 0; i < 32 && !has_come(word, count); ++i) relax();
      continue;
    }
#if defined(__linux__)
    __atomic_fetch_add(word + 1, 1, __ATOMIC_SEQ_CST);
    const uint32_t seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    const timespec slice = {0, SLEEP_NS};
    if ((int32_t)(seen - count) < 0) syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, nullptr, 0);
    __atomic_fetch_sub(word + 1, 1, __ATOMIC_SEQ_CST);
#else
    const timespec slice = {0, 50000};
    nanosleep(&slice, nullptr);
#endif
  }
}

// Says how far this rank is, and wakes who sleep for that.
void raise_to(uint32_t* word, uint32_t count, uint32_t bridged) {
  __atomic_store_n(word, count, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  if (__atomic_load_n(word + 1, __ATOMIC_SEQ_CST) | bridged)
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)bridged;
#endif
}

// Says that this rank's part lies there, and waits for the others'. All threads of the team call it.
void meet(const VxRanks* all, uint32_t count, size_t bytes, VxCtx* ctx) {
  vx_barrier(ctx);  // the part is complete, and all threads have read *count
  if (ctx->tid == 0) {
    *all->count = count;
    uint32_t* word = arrived_word(all, all->rank);
    ArrivedWords* own = (ArrivedWords*)word;
    own->bytes[count & 1] = (uint32_t)bytes;
    raise_to(word, count, own->bridged);
  }
  for (int32_t rank = 0; rank < all->ranks; ++rank)
    if (rank != all->rank) wait_for(arrived_word(all, rank), count, all->abort);
}

// Asks for a line to read and then to write. Not all compilers' own way of saying so keeps the second half.
VX_INLINE void claim(const float* line) {
#if defined(__x86_64__)
  __asm__ volatile("prefetchw %0" : : "m"(*line));
#else
  __builtin_prefetch(line, 1);
#endif
}

// Calls `body(i, n)` for lanes of so many floats, of the other of two ranks, which lie at `part`: each line is claimed
// well before it is read.
template <class Body>
VX_INLINE void for_claimed(const float* part, size_t size, Body body) {
  for (size_t i = 0; i < CLAIMED_AHEAD && i < size; i += 16) claim(part + i);
  for_lanes((int32_t)size, [=](int32_t i, int n) {
    if ((size_t)i + CLAIMED_AHEAD < size) claim(part + i + CLAIMED_AHEAD);
    body(i, n);
  });
}

// Of ranks first ... first + ranks - 1: neighbours in pairs, then neighbouring sums, and so on, as
// vllmx_core.communicator.tree_sum adds them. This rank's part is read at `x`, from where it was put down:
// what others read too comes from further away.
F32x16 tree_sum(const VxRanks* all, uint32_t count, const float* x, size_t at, int n, int32_t first, int32_t ranks) {
  if (ranks == 1) return load_some((first == all->rank ? x : part_of(all, first, count)) + at, n);
  int32_t half = 1;
  while (2 * half < ranks) half *= 2;
  return tree_sum(all, count, x, at, n, first, half) +
         tree_sum(all, count, x, at, n, first + half, ranks - half);
}

// Calls `body(begin, end)` for this thread's share of so many floats.
template <class Body>
VX_INLINE void for_chunks(size_t size, VxCtx* ctx, Body body) {
  for (size_t begin; (begin = (size_t)vx_next(ctx) * CHUNK) < size;)
    body(begin, begin + CHUNK < size ? begin + CHUNK : size);
}

}  // namespace

void all_reduce(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxAllReduce* a = (const VxAllReduce*)args;
  const VxRanks* all = &a->all;
  const size_t total = (size_t)step->T * a->width, most = all->buffer_bytes / sizeof(float);
  uint32_t count = *all->count;
  for (size_t first = 0; first < total; first += most) {
    const size_t size = total - first < most ? total - first : most;
    float* mine = part_of(all, all->rank, ++count);
    const float* x = a->x + first;
    float* y = a->y + first;
    for_chunks(size, ctx, [=](size_t begin, size_t end) {
      memcpy(mine + begin, x + begin, (end - begin) * sizeof(float));
    });
    meet(all, count, size * sizeof(float), ctx);
    for_chunks(size, ctx, [=](size_t begin, size_t end) {
      if (all->ranks == 2) {
        const float* other = part_of(all, 1 - all->rank, count) + begin;
        for_claimed(other, end - begin, [=](int32_t i, int n) {
          store_some(y + begin + i, load_some(x + begin + i, n) + load_some(other + i, n), n);
        });
        return;
      }
      for_lanes((int32_t)(end - begin), [=](int32_t i, int n) {
        store_some(y + begin + i, tree_sum(all, count, x, begin + i, n, 0, all->ranks), n);
      });
    });
    if (first + most < total) vx_barrier(ctx);  // for vx_next; the tape has one behind the last
  }
}
VX_OP(all_reduce, VxAllReduce)

// What the experts of all ranks say of a token, added. Each rank adds a stretch of the tokens, from those ranks
// that have one of their experts, and all take the sums from there: two waits in the place of one, and with many
// ranks much less to read.
struct VxCombine {
  VxRanks all;
  const float* x;          // (T, width) what the experts of this rank say
  float* y;                // (T, width)
  const int32_t* ids;      // (T, chosen)
  const int32_t* ends;     // (ranks) number behind the last expert of each
  int32_t width, chosen;
};

namespace {

// Whether a rank has an expert of the token.
VX_INLINE bool holds(const VxCombine* a, int32_t token, int32_t rank) {
  const int32_t *ids = a->ids + (size_t)token * a->chosen, first = rank ? a->ends[rank - 1] : 0;
  bool found = false;
  for (int32_t slot = 0; slot < a->chosen; ++slot) found |= ids[slot] >= first && ids[slot] < a->ends[rank];
  return found;
}

}  // namespace

void combine(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxCombine* a = (const VxCombine*)args;
  const VxRanks* all = &a->all;
  const size_t width = (size_t)a->width, bytes = width * sizeof(float);
  const int32_t most = (int32_t)(all->buffer_bytes / bytes);
  uint32_t count = *all->count;
  for (int32_t first = 0; first < step->T; first += most) {
    const int32_t rows = step->T - first < most ? step->T - first : most;
    const auto begin_of = [=](int32_t rank) { return (int32_t)((int64_t)rows * rank / all->ranks); };
    float* mine = part_of(all, all->rank, ++count);
    for (int32_t i; (i = vx_next(ctx)) < rows;)
      if (holds(a, first + i, all->rank)) memcpy(mine + i * width, a->x + (size_t)(first + i) * width, bytes);
    meet(all, count, rows * bytes, ctx);
    const int32_t begin = begin_of(all->rank), own = begin_of(all->rank + 1) - begin;
    float* sums = part_of(all, all->rank, count + 1);
    for (int32_t i; (i = vx_next(ctx)) < own;)
      for_lanes(a->width, [=](int32_t k, int n) {
        F32x16 sum = zero();
        for (int32_t rank = 0; rank < all->ranks; ++rank)
          if (holds(a, first + begin + i, rank))
            sum = sum + load_some(part_of(all, rank, count) + (size_t)(begin + i) * width + k, n);
        store_some(sums + (size_t)i * width + k, sum, n);
      });
    meet(all, ++count, own * bytes, ctx);
    for (int32_t i; (i = vx_next(ctx)) < rows;) {
      int32_t rank = (int32_t)((int64_t)i * all->ranks / rows);
      while (begin_of(rank + 1) <= i) ++rank;
      memcpy(a->y + (size_t)(first + i) * width, part_of(all, rank, count) + (size_t)(i - begin_of(rank)) * width, bytes);
    }
    if (first + most < step->T) vx_barrier(ctx);
  }
}
VX_OP(combine, VxCombine)

// Pieces between processes of one host are as small as the nearer caches, out of which the others read them; those
// that go to another host are as long as can be, as each waits for the network.
void all_gather(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxAllGather* a = (const VxAllGather*)args;
  const VxRanks* all = &a->all;
  int32_t widest = 0, width = 0;
  for (int32_t rank = 0; rank < all->ranks; ++rank) {
    widest = a->widths[rank] > widest ? a->widths[rank] : widest;
    width += a->widths[rank];
  }
  const int32_t own = a->widths[all->rank], chunks = (widest + CHUNK - 1) / CHUNK;
  const ArrivedWords* words = (const ArrivedWords*)arrived_word(all, all->rank);
  const size_t bytes = words->bridged || all->buffer_bytes < NEAR_BYTES ? all->buffer_bytes : NEAR_BYTES;
  const int32_t fitting = (int32_t)(bytes / sizeof(float) / (size_t)widest), most = fitting > 1 ? fitting : 1;
  uint32_t count = *all->count;
  for (int32_t first = 0; first < step->T; first += most) {
    const int32_t rows = step->T - first < most ? step->T - first : most;
    float* mine = part_of(all, all->rank, ++count);
    const float* x = a->x + (size_t)first * own;
    for_chunks((size_t)rows * own, ctx, [=](size_t begin, size_t end) {
      memcpy(mine + begin, x + begin, (end - begin) * sizeof(float));
    });
    meet(all, count, (size_t)rows * own * sizeof(float), ctx);
    // A piece of work is a chunk of one rank's part of one row.
    for (int32_t i; (i = vx_next(ctx)) < rows * all->ranks * chunks;) {
      const int32_t row = i / chunks / all->ranks, rank = i / chunks % all->ranks, begin = i % chunks * CHUNK;
      const int32_t part = a->widths[rank], size = part - begin < CHUNK ? part - begin : CHUNK;
      if (size <= 0) continue;
      int32_t at = begin;
      for (int32_t before = 0; before < rank; ++before) at += a->widths[before];
      const float* from = (rank == all->rank ? x : part_of(all, rank, count)) + (size_t)row * part + begin;
      float* to = a->y + ((size_t)first + row) * width + at;
      if (all->ranks == 2 && rank != all->rank)
        for_claimed(from, (size_t)size, [=](int32_t i, int n) { store_some(to + i, load_some(from + i, n), n); });
      else memcpy(to, from, (size_t)size * sizeof(float));
    }
    if (first + most < step->T) vx_barrier(ctx);
  }
}
VX_OP(all_gather, VxAllGather)

// A rank that is a stage of a model puts what it sends down in its two buffers in turn, and counts the
// pieces; the rank behind it counts those that it has taken, before which the next but one must wait.

void send(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxWire* a = (const VxWire*)args;
  const size_t total = (size_t)step->T * a->width, most = a->buffer_bytes / sizeof(float);
  ArrivedWords* own = (ArrivedWords*)a->arrived;
  uint32_t count = *a->count;
  for (size_t first = 0; first < total; first += most) {
    const size_t size = total - first < most ? total - first : most;
    ++count;
    wait_for(a->taken, count - 2, a->abort);
    float* buffer = (float*)(a->buffers + (count & 1) * a->buffer_bytes);
    const float* x = a->x + first;
    for_chunks(size, ctx, [=](size_t begin, size_t end) {
      memcpy(buffer + begin, x + begin, (end - begin) * sizeof(float));
    });
    vx_barrier(ctx);  // the piece is complete, and all threads have read *count
    if (ctx->tid == 0) {
      *a->count = count;
      own->bytes[count & 1] = (uint32_t)(size * sizeof(float));
      raise_to(a->arrived, count, *a->bridged);
    }
  }
}
VX_OP(send, VxWire)

void recv(const void* args, const VxStep* step, VxCtx* ctx) {
  const VxWire* a = (const VxWire*)args;
  const size_t total = (size_t)step->T * a->width, most = a->buffer_bytes / sizeof(float);
  uint32_t count = *a->count;
  for (size_t first = 0; first < total; first += most) {
    const size_t size = total - first < most ? total - first : most;
    wait_for(a->arrived, ++count, a->abort);
    const float* buffer = (const float*)(a->buffers + (count & 1) * a->buffer_bytes);
    float* x = a->x + first;
    for_chunks(size, ctx, [=](size_t begin, size_t end) {
      memcpy(x + begin, buffer + begin, (end - begin) * sizeof(float));
    });
    vx_barrier(ctx);
    if (ctx->tid == 0) {
      *a->count = count;
      raise_to(a->taken, count, *a->bridged);
    }
  }
}
VX_OP(recv, VxWire)

}  // namespace VX_ISA
}  // namespace vx
