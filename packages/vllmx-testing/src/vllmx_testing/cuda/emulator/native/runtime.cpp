// Fibers, the scheduler and the launch entry point.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "device.h"
#include "hopper.h"

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>

#include "state.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
extern "C" char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));

namespace emu {
unsigned char* dynamic_shared;
int lane;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<Warpgroup> warpgroups;
Barrier barrier;
Fiber* current;
int live_threads, block_number;
Order order;
unsigned block_epoch;
char* stacks;

typedef void (*Entry)(void**);
static Entry entry;
static void** arguments;
static void* scheduler_stack;
static unsigned random_state;
static std::string error;
static jmp_buf on_failure;

const unsigned MAX_THREADS = 1024;
const size_t MAX_SHARED_BYTES = 232448;  // of sm_90
const int POISON = 0xff;                 // NaN in every float format

// Context switch, x86-64 System V: save the callee-saved registers, swap stacks.
extern "C" void emu_switch(void** save, void* to);
asm(R"(.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emu_switch,.-emu_switch
)");

void fail(const char* format, ...) {
  char message[512], where[128] = "";
  va_list list;
  va_start(list, format);
  vsnprintf(message, sizeof message, format, list);
  va_end(list);
  if (current) {
    const uint3& t = current->index;
    snprintf(where, sizeof where, " [block (%u,%u,%u) thread (%u,%u,%u)]", blockIdx.x, blockIdx.y,
             blockIdx.z, t.x, t.y, t.z);
  }
  error = std::string(message) + where;
  longjmp(on_failure, 1);
}

void wait_for(const unsigned* generation, unsigned seen, const char* reason, void* pc) {
  Fiber& fiber = *current;
  fiber.awaited = generation, fiber.seen = seen, fiber.reason = reason, fiber.pc = pc;
  while (*generation == seen) emu_switch(&fiber.stack, scheduler_stack);
  fiber.awaited = nullptr;
}

static void fiber_main() {
  entry(arguments);
  current->done = true;
  live_threads--;
  warps[current->warp].live &= ~(1u << current->lane);
  // a block barrier waits for the threads that have not ended
  if (barrier.arrived && barrier.arrived == live_threads)
    barrier.arrived = 0, barrier.generation++, block_epoch++;
  emu_switch(&current->stack, scheduler_stack);
  abort();
}

// ---- scheduler

static unsigned next_rotation() {
  if (order != RANDOM) return 0;
  return (random_state = random_state * 1664525u + 1013904223u) >> 16;
}

// Runs the lanes of a warp until all wait; in random order one pass only, so that warps mix too.
static bool run_warp(int warp, unsigned num_threads) {
  bool any = false, again = true;
  unsigned first = warp * 32, count = num_threads - first < 32 ? num_threads - first : 32;
  while (again) {
    again = false;
    unsigned rotation = next_rotation();
    for (unsigned i = 0; i < count; i++) {
      Fiber& fiber = fibers[first + (order == REVERSE ? count - 1 - i : (i + rotation) % count)];
      if (fiber.done || (fiber.awaited && *fiber.awaited == fiber.seen)) continue;
      current = &fiber, lane = fiber.lane, threadIdx = fiber.index;
      emu_switch(&scheduler_stack, fiber.stack);
      any = again = true;
    }
    if (order == RANDOM && any) break;
  }
  return any;
}

static void prepare_block(unsigned num_threads) {
  block_number++;
  block_epoch = 0;
  barrier = {};
  warps.resize((num_threads + 31) / 32);
  for (size_t w = 0; w < warps.size(); w++) {
    unsigned count = num_threads - w * 32;
    warps[w].meetings.clear();
    warps[w].meetings.reserve(MASKS_PER_WARP);
    warps[w].live = count >= 32 ? 0xffffffffu : (1u << count) - 1;
    warps[w].epoch = 0;
  }
  for (unsigned i = 0; i < num_threads; i++) {
    Fiber& fiber = fibers[i];
    unsigned x = blockDim.x, y = blockDim.y;
    fiber.index = make_uint3(i % x, i / x % y, i / (x * y));
    fiber.id = i, fiber.warp = i / 32, fiber.lane = i % 32, fiber.done = false;
    fiber.awaited = nullptr;
    fiber.warp_epoch = fiber.block_epoch = fiber.atomics = fiber.fence_epoch = 0;
    fiber.arrived = fiber.waited = false;
    fiber.copies.assign(1, {});
    fiber.async_fences.clear(), fiber.in_flight.clear();
    void** top = (void**)(stacks + (i + 1) * STACK_BYTES - 72);  // 16n + 8, as just after a call
    top[0] = nullptr;
    *--top = (void*)fiber_main;
    for (int r = 0; r < 6; r++) *--top = nullptr;
    fiber.stack = top;
  }
  prepare_warpgroups(num_threads);
  live_threads = num_threads;
}

static void run_block(unsigned num_threads) {
  prepare_block(num_threads);
  int count = warps.size();
  while (live_threads) {
    bool any = false;
    unsigned rotation = next_rotation();
    for (int i = 0; i < count; i++)
      any |= run_warp(order == REVERSE ? count - 1 - i : (i + rotation) % count, num_threads);
    if (any || !live_threads) continue;
    bool looks = false;
    for (unsigned i = num_threads; i-- > 0;)
      if (!fibers[i].done) current = &fibers[i], looks |= current->awaited == &look_generation;
    if (looks) {
      look_again();
      continue;
    }
    fail("deadlock: %d threads wait for ever, the first one in %s pc=%p", live_threads,
         current->reason, current->pc);
  }
  for (unsigned i = 0; i < num_threads; i++) {
    current = &fibers[i];
    if (current->copies.size() != 1 || !current->copies[0].empty())
      fail("the thread ended with cp.async that nobody waited for");
    checker_end();
  }
  check_warpgroups();
  current = nullptr;
}

// ---- launch

// A fault inside a kernel (unmapped address, stack overflow, integer division by zero) ends the launch.
static void on_signal(int signal, siginfo_t* info, void* context) {
  void* pc = (void*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
  fail("%s at address %p pc=%p",
       signal == SIGFPE ? "integer division by zero" : "memory fault", info->si_addr, pc);
}
struct SignalTrap {
  static constexpr int SIGNALS[3] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction before[3];
  stack_t stack_before;
  bool set = !is_rank();  // signals are the process's, and launches of ranks overlap
  SignalTrap() {
    if (!set) return;
    static char alternate[64 << 10];
    stack_t stack = {};
    stack.ss_sp = alternate, stack.ss_size = sizeof alternate;
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &action, &before[i]);
  }
  ~SignalTrap() {
    if (!set) return;
    for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};
constexpr int SignalTrap::SIGNALS[3];

static void run_grid(unsigned num_threads, size_t shared_bytes) {
  size_t static_bytes = __start_emulated_shared ? __stop_emulated_shared - __start_emulated_shared : 0;
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
        memset(dynamic_shared, POISON, shared_bytes);
        if (static_bytes) memset(__start_emulated_shared, POISON, static_bytes);
        checker_block();
        run_block(num_threads);
      }
}
}  // namespace emu

// Stacks for the threads of any block, null without memory. They outlive the module and serve every
// other: each is two mappings, and a process has some ten thousand of them.
EMU_API char* emu_make_stacks() {
  using namespace emu;
  void* made = mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return nullptr;
  for (unsigned i = 0; i < MAX_THREADS; i++)  // a stack overflow traps
    if (mprotect((char*)made + i * STACK_BYTES, 4096, PROT_NONE)) return nullptr;
  return (char*)made;
}

// Returns 0, or 1 with the reason in emu_error(). shape: grid x, y, z, block x; stacks: of
// emu_make_stacks, and nobody else's during the launch.
EMU_API int emu_launch(emu::Entry entry, const unsigned* shape, void** arguments,
                       size_t shared_bytes, int order, unsigned seed, char* stacks) {
  using namespace emu;
  error.clear();
  gridDim = dim3(shape[0], shape[1], shape[2]), blockDim = dim3(shape[3], 1, 1);
  if (!shape[0] || !shape[1] || !shape[2] || shape[1] > 65535 || shape[2] > 65535 ||
      !shape[3] || shape[3] > MAX_THREADS || shared_bytes > MAX_SHARED_BYTES) {
    error = "the launch breaks a limit of CUDA";
    return 1;
  }
  emu::entry = entry, emu::arguments = arguments, emu::order = (Order)order;
  emu::stacks = stacks;
  random_state = seed * 2654435761u + 1, current = nullptr, block_number = 0;
  static unsigned char* arena = (unsigned char*)aligned_alloc(1024, 256 << 10);
  dynamic_shared = arena;
  if (fibers.size() < shape[3]) fibers.resize(shape[3]);
  SignalTrap trap;
  if (setjmp(on_failure)) {
    current = nullptr;
    return 1;
  }
  checker_launch(shared_bytes);
  peers_launch(true);
  run_grid(shape[3], shared_bytes);
  peers_launch(false);
  return 0;
}
// Bytes of all static shared arrays of the source, which is at least what each entry has.
EMU_API size_t emu_static_shared() {
  return __start_emulated_shared ? __stop_emulated_shared - __start_emulated_shared : 0;
}

EMU_API const char* emu_error() { return emu::error.c_str(); }
