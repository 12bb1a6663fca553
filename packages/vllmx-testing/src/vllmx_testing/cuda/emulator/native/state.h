// What the parts of the emulator share. Included after NVIDIA's headers, device.h
// and hopper.h.
#pragma once
#include <string>
#include <vector>

namespace emu {

struct Copy {
  void* to;
  const void* from;
  int bytes, source_bytes;
};

// Registers of a thread that a wgmma works on: sums, or a fragment that it reads
struct Registers {
  size_t begin, end;
  bool written;
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
  unsigned fence_epoch;                       // the block's epoch at the last __threadfence
  bool waited;                                // for the launch before, vx_wait_for_predecessor
  bool arrived;                               // at a counter of blocks, and no fence since
  std::vector<std::vector<Copy>> copies;      // cp.async groups, oldest first; the last one is open
  std::vector<unsigned> async_fences;         // the block's epoch at each fence.proxy.async
  std::vector<Registers> in_flight;
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

// One wgmma of a warpgroup, with what each of its threads brings
struct Product {
  WarpgroupCall call;
  float* sums[128];
  const unsigned* fragments[128];
};
struct Warpgroup {
  unsigned generation = 0;
  int arrived = 0;
  bool fenced = false;
  Product open;                              // what its threads are about to do together
  std::vector<std::vector<Product>> groups;  // oldest first; the last one is not committed
};

enum Order { FORWARD, REVERSE, RANDOM };
const size_t STACK_BYTES = 64 << 10;
const int MASKS_PER_WARP = 16;

extern std::vector<Fiber> fibers;
extern std::vector<Warp> warps;
extern std::vector<Warpgroup> warpgroups;
extern Barrier barrier;
extern Fiber* current;  // null between launches
extern int live_threads, block_number;
extern Order order;
extern unsigned block_epoch;
extern char* stacks;

void wait_for(const unsigned* generation, unsigned seen, const char* reason, void* pc);

void prepare_warpgroups(int num_threads);
void check_warpgroups();

// Other ranks; see peers.cpp
extern unsigned look_generation;  // what threads that look for another rank's word wait for
void look_again();
bool is_rank();  // a launch is one of several that wait for each other
void peers_launch(bool begins);
// Whether the bytes are shared with other ranks, and so not an argument's; fails where ranks race
bool peers_touch(const void* p, size_t bytes, bool write, bool atomic, void* pc);

// The checker; empty functions in the fast build
void checker_launch(size_t dynamic_bytes);
void checker_block();
void checker_end();  // of a thread
void checker_in_flight(void* p, size_t bytes, bool on);
// A wgmma begins or ends to read shared memory, and to work on registers
void checker_async_read(const void* p, size_t bytes, bool begins);
void checker_registers(Fiber& fiber, const float* sums, size_t bytes, const unsigned* fragment,
                       bool begins);
}  // namespace emu
