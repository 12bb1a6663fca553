// Warp-wide operations, the block barrier and asynchronous copies.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "device.h"
#include "hopper.h"
#include "state.h"

namespace emu {

void block_barrier() {
  unsigned generation = barrier.generation;
  if (++barrier.arrived == live_threads) {
    barrier.arrived = 0, barrier.generation++, block_epoch++;
  } else {
    wait_for(&barrier.generation, generation, "__syncthreads", __builtin_return_address(0));
  }
  current->block_epoch = block_epoch;
}

// D(16x8) = A(16x16) * B(16x8) from the fragments of 32 lanes. With k2 = (k % 8) / 2: A[r][k] is in
// lane 4 (r % 8) + k2, register r / 8 + 2 (k / 8), half k % 2; B[k][c] in lane 4 c + k2, register
// 4 + k / 8, half k % 2.
static float half_of(unsigned pair, int high, bool bf16) {
  unsigned short bits = (unsigned short)(high ? pair >> 16 : pair);
  if (bf16) return __int_as_float((int)((unsigned)bits << 16));
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}
static void multiply(const Slot* slots, float* d, bool bf16) {
  float a[16][16], b[16][8];
  for (int k = 0; k < 16; k++) {
    int k2 = (k & 7) / 2, k8 = k >> 3;
    for (int r = 0; r < 16; r++) {
      const unsigned* fragment = (const unsigned*)slots[4 * (r & 7) + k2];
      a[r][k] = half_of(fragment[(r >> 3) + 2 * k8], k & 1, bf16);
    }
    for (int c = 0; c < 8; c++)
      b[k][c] = half_of(((const unsigned*)slots[4 * c + k2])[4 + k8], k & 1, bf16);
  }
  for (int r = 0; r < 16; r++) {
    float sums[8] = {};
    for (int k = 0; k < 16; k++)
      for (int c = 0; c < 8; c++) sums[c] += a[r][k] * b[k][c];
    memcpy(d + 8 * r, sums, sizeof sums);
  }
}

// The same of FP8 e4m3, with 32 columns: with k4 = (k % 16) / 4, A[r][k] is in lane 4 (r % 8) + k4, register
// r / 8 + 2 (k / 16), byte k % 4; B[k][c] in lane 4 c + k4, register 4 + k / 16, byte k % 4.
static float code_of(unsigned word, int byte) {
  __nv_fp8_e4m3 code;
  code.__x = (unsigned char)(word >> 8 * byte);
  return (float)code;
}
static void multiply_codes(const Slot* slots, float* d) {
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 8; c++) {
      float sum = 0;
      for (int k = 0; k < 32; k++) {
        int k4 = k % 16 / 4, k16 = k / 16;
        const unsigned* a = (const unsigned*)slots[4 * (r & 7) + k4];
        const unsigned* b = (const unsigned*)slots[4 * c + k4];
        sum += code_of(a[(r >> 3) + 2 * k16], k & 3) * code_of(b[4 + k16], k & 3);
      }
      d[8 * r + c] = sum;
    }
}

static Meeting& meeting_of(Warp& warp, unsigned mask) {
  for (Meeting& meeting : warp.meetings)
    if (meeting.mask == mask) return meeting;
  if (warp.meetings.size() == MASKS_PER_WARP) fail("more than %d warp masks", MASKS_PER_WARP);
  warp.meetings.push_back(Meeting{mask, 0, 0, SHUFFLE, 0, {}, {}});
  return warp.meetings.back();
}

const Slot* exchange(unsigned mask, const void* in, size_t bytes, Operation op,
                     const float** tile) {
  static const char* const NAMES[] = {"",    "shuffle",  "vote",  "__syncwarp",
                                      "mma", "mma", "mma", "ldmatrix", "reduce"};
  Warp& warp = warps[current->warp];
  if (!(mask >> current->lane & 1))
    fail("%s: lane %d calls, but its mask %08x leaves it out", NAMES[op], current->lane, mask);
  if (mask & ~warp.live)
    fail("%s: mask %08x names lanes that do not exist or have ended (live: %08x)", NAMES[op], mask,
         warp.live);
  Meeting& meeting = meeting_of(warp, mask);
  if (!meeting.arrived) {
    meeting.op = op, meeting.bytes = bytes;
  } else if (meeting.op != op || meeting.bytes != bytes) {
    fail("lanes of one warp met in different operations: %s and %s", NAMES[meeting.op], NAMES[op]);
  }
  unsigned generation = meeting.generation;
  memcpy(meeting.slots[generation & 1][current->lane], in, bytes);
  meeting.arrived |= 1u << current->lane;
  if (meeting.arrived == mask) {  // the last to arrive does the common work
    if (op == MMA_BF16 || op == MMA_F16)
      multiply(meeting.slots[generation & 1], meeting.tile[generation & 1], op == MMA_BF16);
    if (op == MMA_E4M3)
      multiply_codes(meeting.slots[generation & 1], meeting.tile[generation & 1]);
    if (op == SYNCWARP) warp.epoch++;
    meeting.arrived = 0, meeting.generation++;
  } else {
    wait_for(&meeting.generation, generation, NAMES[op], __builtin_return_address(0));
  }
  if (op == SYNCWARP) current->warp_epoch = warp.epoch;
  if (tile) *tile = meeting.tile[generation & 1];
  return meeting.slots[generation & 1];
}

// The hardware copies at some time between issue and wait. The orders forward and random copy at the
// wait, so that a missing wait shows; reverse copies at once, so that refilling a buffer which is
// still read shows.
static void carry_out(const Copy& copy) {
  memset(copy.to, 0, copy.bytes);
  memcpy(copy.to, copy.from, copy.source_bytes);
}
void cp_async(void* to, const void* from, int bytes, int source_bytes) {
  if (((size_t)to | (size_t)from) & (bytes - 1))
    fail("cp.async: not %d-byte aligned (to %p from %p)", bytes, to, from);
  if (source_bytes) check(from, source_bytes, 1, false, false);
  check(to, bytes, 1, true, false);
  checker_in_flight(to, bytes, true);
  Copy copy = {to, from, bytes, source_bytes};
  if (order == REVERSE) carry_out(copy);
  current->copies.back().push_back(copy);
}
void cp_commit() { current->copies.emplace_back(); }
void cp_wait(int keep) {
  auto& groups = current->copies;
  while ((int)groups.size() - 1 > keep) {
    for (const Copy& copy : groups.front()) {
      checker_in_flight(copy.to, copy.bytes, false);
      check(copy.to, copy.bytes, 1, true, false);
      if (order != REVERSE) carry_out(copy);
    }
    groups.erase(groups.begin());
  }
}
}  // namespace emu
