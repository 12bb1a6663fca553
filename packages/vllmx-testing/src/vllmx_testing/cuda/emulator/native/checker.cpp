// The checker. It hangs on the compiler's own instrumentation: in the check build a kernel is
// compiled with -fsanitize=thread,alignment,bounds but linked against the hooks at the end of this
// file instead of the sanitizers' libraries, so that every load and store passes through check().
//
// Found: accesses outside the argument buffers or the shared memory, writes to read-only arguments,
// misalignment, reads of shared memory that nobody wrote, races inside a block, conflicting
// accesses of two blocks, use of a cp.async destination in flight. What ranks share is looked after in peers.cpp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "device.h"
#include "hopper.h"
#include "state.h"

namespace emu {
struct Buffer {
  size_t begin, end;
  bool read_only, early;  // early: may be read before the launch before has ended
};
static std::vector<Buffer> buffers;
static bool begins_early;  // the launch, and so each thread must wait
}  // namespace emu

EMU_API void emu_clear_buffers(int begins_early) {
  emu::buffers.clear();
  emu::begins_early = begins_early;
}
EMU_API void emu_add_buffer(size_t p, size_t bytes, int read_only, int early) {
  emu::buffers.push_back({p, p + bytes, read_only != 0, early != 0});
}

#ifndef EMU_CHECK
namespace emu {
void check(const void*, size_t, size_t, bool, bool) {}
void checker_arrival(const unsigned*) {}
void checker_fence() {}
void checker_wait() {}
void checker_end() {}
void checker_launch(size_t) {}
void checker_block() {}
void checker_in_flight(void*, size_t, bool) {}
void checker_async_read(const void*, size_t, bool) {}
void checker_registers(Fiber&, const float*, size_t, const unsigned*, bool) {}
}  // namespace emu
#else
#include <link.h>

extern "C" char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));

namespace emu {
static const short NOBODY = -1, MANY = -2;

// One a byte: who wrote it last and who read it last, with their logical clocks
struct Cell {
  int write_block = -1, read_block = -1;
  short writer = NOBODY, reader = NOBODY;
  unsigned write_block_epoch = 0, write_warp_epoch = 0, read_block_epoch = 0, read_warp_epoch = 0;
  bool written_atomically = false, in_flight = false;
  unsigned write_fences = 0;  // how many fence.proxy.async the writer had made
  short async_reads = 0;      // of wgmma in flight
};
static std::vector<std::vector<Cell>> global_cells;  // one vector a buffer
static std::vector<Cell> dynamic_cells, static_cells;
static std::vector<std::pair<size_t, size_t>> image;  // this library: constants live there
static void* pc;

static int find_image(dl_phdr_info* info, size_t, void*) {
  std::vector<std::pair<size_t, size_t>> parts;
  bool mine = false;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    size_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    parts.emplace_back(begin, begin + info->dlpi_phdr[i].p_memsz);
    mine |= (size_t)&image >= begin && (size_t)&image < parts.back().second;
  }
  if (mine) image = parts;
  return mine;
}
void checker_launch(size_t dynamic_bytes) {
  if (image.empty()) dl_iterate_phdr(find_image, nullptr);
  dynamic_cells.resize(dynamic_bytes);
  static_cells.resize(__start_emulated_shared ? __stop_emulated_shared - __start_emulated_shared : 0);
  global_cells.resize(buffers.size());
  for (size_t i = 0; i < buffers.size(); i++)
    global_cells[i].assign(buffers[i].end - buffers[i].begin, Cell());
}
// From which barrier on all threads of the block have seen an atomic of one of them
static unsigned acquired_epoch;
// The first epoch of the block behind its last write to global memory; 0: none
static unsigned written_epoch;
void checker_block() {
  acquired_epoch = ~0u, written_epoch = 0;
  dynamic_cells.assign(dynamic_cells.size(), Cell());
  static_cells.assign(static_cells.size(), Cell());
}

// Did that access happen before what the current thread does now?
static bool ordered(int block, short thread, unsigned block_clock, unsigned warp_clock) {
  if (block != block_number) return false;
  if (thread == current->id || block_clock < current->block_epoch) return true;
  return thread != MANY && fibers[thread].warp == current->warp && warp_clock < current->warp_epoch;
}

static void record_write(Cell& cell, bool atomic) {
  cell.write_block = block_number, cell.writer = current->id;
  cell.write_block_epoch = current->block_epoch, cell.write_warp_epoch = current->warp_epoch;
  cell.written_atomically = atomic, cell.reader = NOBODY;
  cell.write_fences = current->async_fences.size();
}
static void record_read(Cell& cell) {
  bool keep = cell.reader != NOBODY && cell.reader != current->id &&
              cell.read_block == block_number && cell.read_block_epoch == current->block_epoch;
  bool same_warp = keep && cell.reader >= 0 && fibers[cell.reader].warp == current->warp;
  cell.reader = keep && !same_warp ? MANY : current->id;
  cell.read_block = block_number;
  cell.read_block_epoch = current->block_epoch, cell.read_warp_epoch = current->warp_epoch;
}

static void touch(Cell* cells, size_t bytes, bool write, bool atomic, bool shared, const void* p) {
  const char* space = shared ? "shared" : "global";
  const char* verb = write ? "write" : "read";
  for (size_t i = 0; i < bytes; i++) {
    Cell& cell = cells[i];
    if (cell.in_flight)
      fail("%s of %s memory %p while a cp.async to it is in flight pc=%p", verb, space, p, pc);
    if (write && cell.async_reads)
      fail("write of shared memory %p while a wgmma reads it pc=%p", p, pc);
    if (shared && !write && cell.writer == NOBODY)
      fail("uninitialised shared memory read at %p pc=%p", p, pc);
    // After any atomic of this thread, or of another one before a barrier, what other blocks wrote
    // counts as acquired through it.
    bool trusted = !shared && (current->atomics || current->block_epoch >= acquired_epoch);
    bool write_trusted = trusted && cell.write_block >= 0 && cell.write_block != block_number;
    bool read_trusted = trusted && cell.read_block != block_number;
    if (cell.writer != NOBODY && !(atomic && cell.written_atomically) && !write_trusted &&
        !ordered(cell.write_block, cell.writer, cell.write_block_epoch, cell.write_warp_epoch))
      fail("race on %s memory %p: %s after thread %d of block #%d wrote it, no barrier between pc=%p",
           space, p, verb, cell.writer, cell.write_block, pc);
    if (write && !atomic && cell.reader != NOBODY && !write_trusted && !read_trusted &&
        !ordered(cell.read_block, cell.reader, cell.read_block_epoch, cell.read_warp_epoch))
      fail("race on %s memory %p: write after thread %d of block #%d read it, no barrier between pc=%p",
           space, p, cell.reader, cell.read_block, pc);
    if (write) {
      if (!shared && !atomic) written_epoch = max(written_epoch, current->block_epoch + 1);
      record_write(cell, atomic);
    } else {
      record_read(cell);
    }
  }
}

static Cell* shared_cells(size_t address, size_t bytes) {
  size_t at = address - (size_t)dynamic_shared;
  if (at < dynamic_cells.size()) {
    if (at + bytes > dynamic_cells.size())
      fail("%zu-byte access runs past dynamic shared memory pc=%p", bytes, pc);
    return &dynamic_cells[at];
  }
  at = address - (size_t)__start_emulated_shared;
  if (at < static_cells.size() && at + bytes <= static_cells.size()) return &static_cells[at];
  return nullptr;
}

static void check_global(const void* p, size_t bytes, bool write, bool atomic) {
  size_t address = (size_t)p;
  const char* verb = write ? "write" : "read";
  bool read_only = false, waits = begins_early && !current->waited;
  for (size_t i = 0; i < buffers.size(); i++) {
    if (address < buffers[i].begin || address + bytes > buffers[i].end) continue;
    read_only |= write && buffers[i].read_only;  // the same memory may come in once more, writable
    if (write && buffers[i].read_only) continue;
    if (waits && (write || !buffers[i].early))
      fail("%s of pointer argument #%zu before vx_wait_for_predecessor: the launch before may still run pc=%p",
           verb, i, pc);
    return touch(&global_cells[i][address - buffers[i].begin], bytes, write, atomic, false, p);
  }
  if (read_only) fail("write to a read-only argument at %p pc=%p", p, pc);
  if (!write)
    for (auto& part : image)
      if (address >= part.first && address < part.second) return;
  for (size_t i = 0; i < buffers.size(); i++)
    if (address + bytes + 4096 > buffers[i].begin && address < buffers[i].end + 4096)
      fail("out of bounds: %zu-byte %s at byte %zd of pointer argument #%zu, which has %zu pc=%p",
           bytes, verb, (ssize_t)(address - buffers[i].begin), i, buffers[i].end - buffers[i].begin,
           pc);
  fail("out of bounds: %zu-byte %s at %p, in no buffer pc=%p", bytes, verb, p, pc);
}

static void check_registers(size_t address, size_t bytes, bool write) {
  for (const Registers& r : current->in_flight)
    if (address < r.end && address + bytes > r.begin && (write || r.written))
      fail("%s of a register that a wgmma in flight %s pc=%p", write ? "write" : "read",
           r.written ? "sums in" : "reads", pc);
}

void check(const void* p, size_t bytes, size_t align, bool write, bool atomic) {
  if (!current) return;
  size_t address = (size_t)p;
  if (address - (size_t)(stacks + current->id * STACK_BYTES) < STACK_BYTES)
    return check_registers(address, bytes, write);
  if (address & (align - 1)) fail("misaligned %zu-byte access at %p pc=%p", bytes, p, pc);
  if (peers_touch(p, bytes, write, atomic, pc)) return;
  if (atomic) current->atomics++, acquired_epoch = min(acquired_epoch, current->block_epoch + 1);
  if (Cell* cells = shared_cells(address, bytes)) return touch(cells, bytes, write, atomic, true, p);
  check_global(p, bytes, write, atomic);
}

// A thread announces what its block wrote: all threads by a barrier and one fence behind it. What other blocks
// wrote is theirs to read once that thread has fenced again, and the others have met it at a barrier.
void checker_arrival(const unsigned* p) {
  pc = __builtin_return_address(0);
  if (current->fence_epoch < written_epoch)
    fail("a block announces global memory that its threads may still write: no barrier and __threadfence before "
         "the counter %p pc=%p", p, pc);
  check_global(p, sizeof *p, true, true);
  current->arrived = true;
}
void checker_fence() {
  if (!current) return;
  current->fence_epoch = current->block_epoch;
  if (!current->arrived) return;
  current->arrived = false;
  current->atomics++, acquired_epoch = min(acquired_epoch, current->block_epoch + 1);
}

void checker_wait() {
  if (current) current->waited = true;
}
void checker_end() {
  if (begins_early && !current->waited)
    fail("the thread ended without vx_wait_for_predecessor: the launch behind trusts that it waited");
}

void checker_in_flight(void* p, size_t bytes, bool on) {
  Cell* cells = shared_cells((size_t)p, bytes);
  if (!cells) fail("the destination of a cp.async, %p, is not shared memory", p);
  for (size_t i = 0; i < bytes; i++) cells[i].in_flight = on;
}

// Whether the writer made a fence.proxy.async behind the write and before a barrier, or the current
// thread one behind that barrier
static bool fenced(const Cell& cell) {
  const auto &theirs = fibers[cell.writer].async_fences, &mine = current->async_fences;
  if (cell.write_fences < theirs.size() && theirs[cell.write_fences] < current->block_epoch)
    return true;
  return !mine.empty() && mine.back() > cell.write_block_epoch;
}
void checker_async_read(const void* p, size_t bytes, bool begins) {
  Cell* cells = shared_cells((size_t)p, bytes);
  if (!cells) fail("a wgmma reads %p, which is not dynamic shared memory", p);
  for (size_t i = 0; i < bytes; i++) {
    Cell& cell = cells[i];
    cell.async_reads += begins ? 1 : -1;
    if (!begins) {  // the warpgroup has waited: who writes next needs a barrier behind that
      cell.reader = MANY, cell.read_block = block_number;
      cell.read_block_epoch = current->block_epoch;
      continue;
    }
    if (cell.in_flight) fail("a wgmma reads %p while a cp.async to it is in flight", p);
    if (cell.writer == NOBODY) fail("a wgmma reads uninitialised shared memory at %p", p);
    if (cell.write_block_epoch >= current->block_epoch)
      fail("race on shared memory %p: a wgmma reads it after thread %d wrote it, no barrier between",
           p, cell.writer);
    if (!fenced(cell))
      fail("a wgmma reads %p, which thread %d wrote, no fence.proxy.async between", p, cell.writer);
  }
}

void checker_registers(Fiber& fiber, const float* sums, size_t bytes, const unsigned* fragment,
                       bool begins) {
  auto& list = fiber.in_flight;
  Registers used[2] = {{(size_t)sums, (size_t)sums + bytes, true},
                       {(size_t)fragment, (size_t)fragment + 16, false}};
  for (int i = 0; i < (fragment ? 2 : 1); i++) {
    if (begins) {
      list.push_back(used[i]);
      continue;
    }
    for (size_t at = 0; at < list.size(); at++)
      if (list[at].begin == used[i].begin) {
        list.erase(list.begin() + at);
        break;
      }
  }
}
}  // namespace emu

// ---- the hooks that instrumented code calls

#define EMU_HOOK(name, bytes, write)              \
  extern "C" void name(void* p) {                 \
    emu::pc = __builtin_return_address(0);        \
    emu::check(p, bytes, 1, write, false);        \
  }
#define EMU_HOOKS(n)                                                                      \
  EMU_HOOK(__tsan_read##n, n, false) EMU_HOOK(__tsan_write##n, n, true)                   \
  EMU_HOOK(__tsan_unaligned_read##n, n, false) EMU_HOOK(__tsan_unaligned_write##n, n, true) \
  EMU_HOOK(__tsan_volatile_read##n, n, false) EMU_HOOK(__tsan_volatile_write##n, n, true)
EMU_HOOKS(1) EMU_HOOKS(2) EMU_HOOKS(4) EMU_HOOKS(8) EMU_HOOKS(16)
extern "C" void __tsan_read_range(void* p, size_t bytes) {
  emu::pc = __builtin_return_address(0);
  emu::check(p, bytes, 1, false, false);
}
extern "C" void __tsan_write_range(void* p, size_t bytes) {
  emu::pc = __builtin_return_address(0);
  emu::check(p, bytes, 1, true, false);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

struct UbLocation {
  const char* file;
  unsigned line, column;
};
struct UbMismatch {
  UbLocation location;
  void* type;
  unsigned char log_align, kind;
};
extern "C" void __ubsan_handle_type_mismatch_v1(UbMismatch* data, size_t p) {
  if (emu::current)
    emu::fail("misaligned pointer %p needs %d-byte alignment at %s:%u", (void*)p,
              1 << data->log_align, data->location.file, data->location.line);
}
extern "C" void __ubsan_handle_out_of_bounds(UbLocation* location, size_t index) {
  if (emu::current)
    emu::fail("array index %zd out of bounds at %s:%u", (ssize_t)index, location->file,
              location->line);
}
#endif
