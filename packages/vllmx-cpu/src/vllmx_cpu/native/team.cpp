#include "team.h"

#include <stdlib.h>

#include "apart.h"
#include "futex.h"

namespace {

using namespace vx;

// Two steps in flight, each in two halves, and passes of a tower between them.
enum { MAX_THREADS = 256, QUEUE = 16, PAUSE_NS = 500000 };

struct alignas(64) Member {
  VxCtx ctx;
  pthread_t thread;
  int64_t barrier_budget_ns;
};

}  // namespace

struct VxTeam {
  alignas(64) uint32_t arrived;   // at the barrier
  alignas(64) Word phase;         // advanced by the last thread to arrive
  alignas(64) int32_t next;       // the counter of vx_next
  alignas(64) Word job_posted;    // wakes the workers; thread 0 posts
  VxJob* job;                     // null: the team ends
  bool after_pause;               // the job was waited for at least PAUSE_NS
  Member* members;
  int32_t num_threads;

  pthread_mutex_t mutex;          // guards the queue and VxJob::done
  pthread_cond_t queued, finished;
  VxJob* queue[QUEUE];
  int32_t queue_head, queue_length, ending;
};

void vx_barrier(VxCtx* ctx) {
  VxTeam* team = ctx->team;
  const uint32_t phase = word_load(&team->phase);
  if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)ctx->nth) {
    __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->next, 0, __ATOMIC_RELAXED);
    word_advance(&team->phase);
  } else {
    word_wait(&team->phase, phase, &team->members[ctx->tid].barrier_budget_ns);
  }
}

int32_t vx_next(VxCtx* ctx) { return __atomic_fetch_add(&ctx->team->next, 1, __ATOMIC_RELAXED); }

namespace {

void resolve_tokens(VxJob* job) {
  if (!job->tokens) return;
  for (int32_t i = 0; i < job->step.T; ++i) {
    const int32_t token = job->tokens[i];
    if (token >= 0) continue;
    const int32_t row = -(token + 1);
    const int32_t id = row < job->num_previous_ids ? job->previous_ids[row] : 0;
    job->tokens[i] = id < 0 ? 0 : id;  // -1: that row failed, the engine drops this one too
  }
}

void run_records(VxJob* job, VxCtx* ctx) {
  const OwnProcessor own(ctx->team->after_pause, ctx->tid, ctx->nth);
  int64_t begin = now_ns();
  // Read now: when this thread leaves the last barrier, the job may be gone already.
  const int32_t count = job->num_records;
  VxStep pooled = job->step;
  pooled.T = pooled.L;
  for (int32_t i = 0; i < count; ++i) {
    const VxRecord& record = job->records[i];
    record.run(record.args, record.pooled ? &pooled : &job->step, ctx);
    vx_barrier(ctx);
    if (ctx->tid == 0 && job->record_seconds) {
      const int64_t end = now_ns();
      job->record_seconds[i] += (double)(end - begin) * 1e-9;
      begin = end;
    }
  }
}

void* worker_main(void* argument) {
  Member* member = (Member*)argument;
  VxTeam* team = member->ctx.team;
  int64_t budget_ns = 20000;
  uint32_t seen = 0;
  for (;;) {
    word_wait(&team->job_posted, seen, &budget_ns);
    seen = word_load(&team->job_posted);
    VxJob* job = team->job;
    if (!job) return nullptr;
    run_records(job, &member->ctx);
  }
}

VxJob* take_job(VxTeam* team) {
  pthread_mutex_lock(&team->mutex);
  while (team->queue_length == 0 && !team->ending) pthread_cond_wait(&team->queued, &team->mutex);
  VxJob* job = nullptr;
  if (team->queue_length > 0) {
    job = team->queue[team->queue_head];
    team->queue_head = (team->queue_head + 1) % QUEUE;
    --team->queue_length;
  }
  pthread_mutex_unlock(&team->mutex);
  return job;
}

void* driver_main(void* argument) {
  Member* member = (Member*)argument;
  VxTeam* team = member->ctx.team;
  for (;;) {
    const int64_t idle_from = now_ns();
    VxJob* job = take_job(team);
    if (job) resolve_tokens(job);
    team->job = job;
    const int64_t begin = now_ns();
    team->after_pause = begin - idle_from >= PAUSE_NS;
    word_advance(&team->job_posted);
    if (!job) return nullptr;
    run_records(job, &member->ctx);
    job->seconds = (double)(now_ns() - begin) * 1e-9;
    pthread_mutex_lock(&team->mutex);
    job->done = 1;
    pthread_cond_broadcast(&team->finished);
    pthread_mutex_unlock(&team->mutex);
  }
}

void* allocate(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
#if defined(_WIN32)
  return _aligned_malloc(bytes, 64);
#else
  void* memory = nullptr;
  return posix_memalign(&memory, 64, bytes) == 0 ? memory : nullptr;
#endif
}

void give_back(void* memory) {
#if defined(_WIN32)
  _aligned_free(memory);
#else
  free(memory);
#endif
}

void release(VxTeam* team) {
  for (int32_t i = 0; i < team->num_threads; ++i) give_back(team->members[i].ctx.scratch);
  give_back(team->members);
  pthread_mutex_destroy(&team->mutex);
  pthread_cond_destroy(&team->queued);
  pthread_cond_destroy(&team->finished);
  give_back(team);
}

}  // namespace

VxTeam* vx_team_create(int32_t num_threads, size_t scratch_bytes) {
  if (num_threads < 1 || num_threads > MAX_THREADS) return nullptr;
  VxTeam* team = (VxTeam*)allocate(sizeof(VxTeam));
  if (!team) return nullptr;
  __builtin_memset((void*)team, 0, sizeof *team);
#if !defined(__linux__)
  pthread_mutex_init(&team->phase.mutex, nullptr);
  pthread_cond_init(&team->phase.changed, nullptr);
  pthread_mutex_init(&team->job_posted.mutex, nullptr);
  pthread_cond_init(&team->job_posted.changed, nullptr);
#endif
  pthread_mutex_init(&team->mutex, nullptr);
  pthread_cond_init(&team->queued, nullptr);
  pthread_cond_init(&team->finished, nullptr);
  team->members = (Member*)allocate(sizeof(Member) * (size_t)num_threads);
  if (!team->members) return release(team), nullptr;
  for (int32_t i = 0; i < num_threads; ++i) {
    uint8_t* scratch = (uint8_t*)allocate(scratch_bytes);
    team->members[i].ctx = {i, num_threads, team, scratch, scratch_bytes};
    team->members[i].barrier_budget_ns = 20000;
    team->num_threads = i + 1;
    if (!scratch) return release(team), nullptr;
  }
  int32_t started = 0;
  for (int32_t i = num_threads - 1; i >= 0; --i) {  // the driver last
    void* (*main_function)(void*) = i == 0 ? driver_main : worker_main;
    if (pthread_create(&team->members[i].thread, nullptr, main_function, &team->members[i]) != 0) break;
    ++started;
  }
  if (started == num_threads) return team;
  word_advance(&team->job_posted);  // job is null: the workers that did start end
  for (int32_t i = num_threads - started; i < num_threads; ++i)
    pthread_join(team->members[i].thread, nullptr);
  release(team);
  return nullptr;
}

void vx_team_destroy(VxTeam* team) {
  pthread_mutex_lock(&team->mutex);
  team->ending = 1;
  pthread_cond_signal(&team->queued);
  pthread_mutex_unlock(&team->mutex);
  for (int32_t i = 0; i < team->num_threads; ++i) pthread_join(team->members[i].thread, nullptr);
  release(team);
}

int32_t vx_submit(VxTeam* team, VxJob* job) {
  pthread_mutex_lock(&team->mutex);
  const bool room = team->queue_length < QUEUE;
  if (room) {
    job->done = 0;
    team->queue[(team->queue_head + team->queue_length++) % QUEUE] = job;
    pthread_cond_signal(&team->queued);
  }
  pthread_mutex_unlock(&team->mutex);
  return room ? 0 : -1;
}

void vx_wait(VxTeam* team, VxJob* job) {
  pthread_mutex_lock(&team->mutex);
  while (!job->done) pthread_cond_wait(&team->finished, &team->mutex);
  pthread_mutex_unlock(&team->mutex);
}
