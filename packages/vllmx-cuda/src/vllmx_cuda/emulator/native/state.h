// What the parts of the emulator share. Included after NVIDIA's headers and device.h.
#pragma once
#include <string>
#include <vector>

namespace emu {

struct Copy {
  void* to;
  const void* from;
  int bytes, source_bytes;
};

struct Fiber {
  void* stack;
  uint3 index;
  int id, warp, lane;
  bool done;
  const unsigned* awaited;  // runs again when *awaited != seen
  unsigned seen;
  const char* reason;
  void* pc;
  unsigned warp_epoch, block_epoch, atomics;  // the checker's logical clocks
  std::vector<std::vector<Copy>> copies;      // cp.async groups, oldest first; the last one is open
};

// Lanes that meet under one mask
struct Meeting {
  unsigned mask, arrived, generation;
  Operation op;
  size_t bytes;
  Slot slots[2][32];
  float tile[2][128];
};
struct Warp {
  std::vector<Meeting> meetings;
  unsigned live, epoch;
};
struct Barrier {
  unsigned generation;
  int arrived;
};

enum Order { FORWARD, REVERSE, RANDOM };
const size_t STACK_BYTES = 64 << 10;
const int MASKS_PER_WARP = 16;

extern std::vector<Fiber> fibers;
extern std::vector<Warp> warps;
extern Barrier barrier;
extern Fiber* current;  // null between launches
extern int live_threads, block_number;
extern Order order;
extern unsigned block_epoch;
extern char* stacks;

void wait_for(const unsigned* generation, unsigned seen, const char* reason, void* pc);

// The checker; empty functions in the fast build
void checker_launch(size_t dynamic_bytes);
void checker_block();
void checker_in_flight(void* p, size_t bytes, bool on);
}  // namespace emu
