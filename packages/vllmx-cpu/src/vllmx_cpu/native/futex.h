// Sleeping until a 32-bit word changes: futex on Linux, a mutex and condition variable elsewhere.
#pragma once
#include <pthread.h>
#include <stdint.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vx {

struct Word {
  uint32_t value = 0;
  uint32_t sleepers = 0;
#if !defined(__linux__)
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
#endif
};

static inline uint32_t word_load(const Word* w) { return __atomic_load_n(&w->value, __ATOMIC_ACQUIRE); }

// Sleeps while the word still has the value `seen`.
static inline void word_sleep(Word* w, uint32_t seen) {
  __atomic_fetch_add(&w->sleepers, 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  syscall(SYS_futex, &w->value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
  pthread_mutex_lock(&w->mutex);
  if (word_load(w) == seen) pthread_cond_wait(&w->changed, &w->mutex);
  pthread_mutex_unlock(&w->mutex);
#endif
  __atomic_fetch_sub(&w->sleepers, 1, __ATOMIC_SEQ_CST);
}

// Changes the word and wakes everybody who sleeps on it. The system call is left out when nobody
// does: a sleeper counts itself before it looks at the word again, we look after changing it.
static inline void word_advance(Word* w) {
#if defined(__linux__)
  __atomic_fetch_add(&w->value, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&w->sleepers, __ATOMIC_SEQ_CST) != 0)
    syscall(SYS_futex, &w->value, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
  pthread_mutex_lock(&w->mutex);
  __atomic_fetch_add(&w->value, 1, __ATOMIC_SEQ_CST);
  pthread_cond_broadcast(&w->changed);
  pthread_mutex_unlock(&w->mutex);
#endif
}

static inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until the word differs from `seen`: spins for at most *budget_ns, then sleeps. The budget
// learns: it shrinks whenever spinning was in vain (somebody lost a core), and grows back slowly.
static inline void word_wait(Word* w, uint32_t seen, int64_t* budget_ns) {
  enum { LEAST_NS = 2000, MOST_NS = 60000 };
  if (word_load(w) != seen) return;
  const int64_t end = now_ns() + *budget_ns;
  do {
    for (int i = 0; i < 32; ++i) {
      if (word_load(w) != seen) {
        *budget_ns += *budget_ns / 8;
        if (*budget_ns > MOST_NS) *budget_ns = MOST_NS;
        return;
      }
      relax();
    }
  } while (now_ns() < end);
  *budget_ns /= 2;
  if (*budget_ns < LEAST_NS) *budget_ns = LEAST_NS;
  while (word_load(w) == seen) word_sleep(w, seen);
}

}  // namespace vx
