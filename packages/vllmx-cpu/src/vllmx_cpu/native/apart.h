// Threads that have as many processors as they are keep one each while a step runs that begins after
// a pause.
//
// A guest of KVM takes a halted processor for one that the host has given to somebody else: so after
// a pause Linux wakes a thread on the processor of the one that wakes it, again and again within a
// step, and two threads need as long as one. Steps that follow each other closely leave no processor
// time to halt, and there threads are free, to make way for what else runs.
#pragma once
#include <stdint.h>

#if defined(__linux__)
#include <sched.h>
#endif

namespace vx {

// The processor of thread `index` of `count`, from construction to destruction. Where there are
// more or fewer processors than threads, nothing happens.
class OwnProcessor {
 public:
  OwnProcessor(bool wanted, int32_t index, int32_t count) {
#if defined(__linux__)
    if (!wanted || sched_getaffinity(0, sizeof allowed_, &allowed_) != 0) return;
    if (CPU_COUNT(&allowed_) != count) return;
    cpu_set_t own;
    CPU_ZERO(&own);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &allowed_) && index-- == 0) CPU_SET(cpu, &own);
    has_it_ = sched_setaffinity(0, sizeof own, &own) == 0;
#else
    (void)wanted, (void)index, (void)count;
#endif
  }
  ~OwnProcessor() {
#if defined(__linux__)
    if (has_it_) sched_setaffinity(0, sizeof allowed_, &allowed_);
#endif
  }
  OwnProcessor(const OwnProcessor&) = delete;
  OwnProcessor& operator=(const OwnProcessor&) = delete;

 private:
#if defined(__linux__)
  cpu_set_t allowed_;
  bool has_it_ = false;
#endif
};

}  // namespace vx
