// Memory that several ranks share, each of them a copy of this library on a thread of its own: words by which they
// wait for each other, and the checker of what they read and write there.
//
// The checker knows of each two bytes who wrote them last and where each rank read them last. Such an access is over
// for a thread of another rank when that one, or one of its block before a barrier, has loaded a word with
// vx_load_acquire that the accessing rank stored behind it with vx_store_release: in the same thread, behind a
// barrier of the block, or in a later launch. It does not matter who came first when the test ran.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <map>

#include "device.h"
#include "hopper.h"
#include "state.h"

namespace emu {
const int MOST_RANKS = 8;

struct Stamp {
  int rank = -1, block = 0, thread = 0;
  unsigned launch = 0, epoch = 0, number = 0;  // of the rank's accesses
};
struct SharedCell {
  Stamp write, reads[MOST_RANKS];
  bool released = false;
};
struct SharedMemory {
  size_t begin, end;
  std::vector<SharedCell> cells;  // one for two bytes; none in the fast build
};
// That a thread of a block has loaded what a rank released
struct Learned {
  Stamp of, by;
};
// What all modules of a rank know
struct Rank {
  int number;
  unsigned launch = 0, accesses = 0;
  std::map<std::pair<int, int>, Stamp> before;  // learned in earlier launches, the newest of each rank's blocks
  std::vector<Learned> now;
};
static Rank* self;
static std::vector<SharedMemory*> shared;
static int (*pass_on)(int published);  // not 0: all ranks wait, and nobody will tell them anything
static bool published;
static unsigned looks;  // of a launch
unsigned look_generation;

bool is_rank() { return self; }

// Every other look comes too early: before others could do anything
void look_again() {
  if (looks++ % 2 && pass_on && pass_on(published)) fail("deadlock between ranks: all wait for words that nobody stores");
  if (looks % 2 == 0) published = false;
  look_generation++;
}

void peers_launch(bool begins) {
  if (!self) return;
  if (begins) {
    self->launch++, self->now.clear(), looks = 0;
    return;
  }
  for (const Learned& one : self->now) self->before[{one.of.rank, one.of.block}] = one.of;
}

static Stamp here() {
  return {self->number, block_number, current->id, self->launch, current->block_epoch, self->accesses};
}
// Whether who learned of `seen` knows that `access` is over
static bool covers(const Stamp& seen, const Stamp& access) {
  if (seen.rank != access.rank) return false;
  if (seen.launch != access.launch) return seen.launch > access.launch;
  if (seen.block != access.block) return false;
  return seen.epoch > access.epoch || (seen.thread == access.thread && seen.number > access.number);
}
static bool is_over(const Stamp& access) {
  Stamp now = here();
  if (access.rank < 0) return true;
  if (access.rank == now.rank) {
    if (access.launch < now.launch) return true;
    return access.block == now.block && (access.epoch < now.epoch || access.thread == now.thread);
  }
  for (auto& one : self->before)
    if (covers(one.second, access)) return true;
  for (const Learned& one : self->now)
    if (one.by.block == now.block && (one.by.thread == now.thread || one.by.epoch < now.epoch) &&
        covers(one.of, access))
      return true;
  return false;
}

static SharedCell* cells_of(const void* p, size_t bytes) {
  size_t at = (size_t)p;
  for (SharedMemory* memory : shared)
    if (at >= memory->begin && at + bytes <= memory->end && !memory->cells.empty())
      return &memory->cells[(at - memory->begin) / 2];
  return nullptr;
}

bool peers_touch(const void* p, size_t bytes, bool write, bool atomic, void* pc) {
  SharedCell* cells = self ? cells_of(p, bytes) : nullptr;
  if (!cells) return false;
  self->accesses++;
  const char* verb = write ? "writes" : "reads";
  for (size_t i = 0; i < (bytes + 1) / 2; i++) {
    SharedCell& cell = cells[i];
    if (!(atomic && cell.released) && !is_over(cell.write))
      fail("race between ranks: rank %d %s %p, which rank %d wrote without telling it pc=%p", self->number, verb, p,
           cell.write.rank, pc);
    if (!write && !atomic) cell.reads[self->number] = here();
    if (!write) continue;
    for (const Stamp& read : cell.reads)
      if (!is_over(read))
        fail("race between ranks: rank %d writes %p, which rank %d may still read pc=%p", self->number, p, read.rank,
             pc);
    cell.write = here(), cell.released = atomic;
  }
  return true;
}

void store_release(unsigned* p, unsigned value) {
  check(p, 4, 4, true, true);
  *p = value;
  published = true;
}
// Lets the block's other threads run, and other ranks, before it looks
unsigned load_acquire(const unsigned* p) {
  wait_for(&look_generation, look_generation, "vx_load_acquire", __builtin_return_address(0));
  check(p, 4, 4, false, true);
  SharedCell* cell = self ? cells_of(p, 4) : nullptr;
  if (cell && cell->released && cell->write.rank != self->number) self->now.push_back({cell->write, here()});
  return *p;
}
}  // namespace emu

// A rank, and memory that ranks share: made once, and given to every module that the rank launches
EMU_API void* emu_make_rank(int number) { return new emu::Rank{number}; }
EMU_API void* emu_make_shared(size_t begin, size_t bytes) {
  size_t cells = 0;
#ifdef EMU_CHECK
  cells = (bytes + 1) / 2;
#endif
  return new emu::SharedMemory{begin, begin + bytes, std::vector<emu::SharedCell>(cells)};
}
EMU_API void emu_free_rank(void* rank) { delete (emu::Rank*)rank; }
EMU_API void emu_free_shared(void* memory) { delete (emu::SharedMemory*)memory; }
EMU_API void emu_join(void* rank, void** memories, int count, int (*pass_on)(int)) {
  emu::self = (emu::Rank*)rank;
  emu::shared.assign((emu::SharedMemory**)memories, (emu::SharedMemory**)memories + count);
  emu::pass_on = pass_on;
}
