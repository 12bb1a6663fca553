// The thread team: runs recorded steps, one after the other, in threads of its own.
//
// Thread 0 is the driver: it takes jobs from a queue, so that `vx_submit` returns at once and Python
// is never inside the step. All threads of the team walk the job's records together with a barrier
// after each. Between jobs everybody sleeps.
#pragma once
#include "vx.h"

#define VX_API extern "C" VX_EXPORT

// One op of a recorded step.
struct VxRecord {
  VxOp run;
  const void* args;
  int32_t pooled;                 // 1: the op works on the L logit rows as if they were the T tokens
};

// A step in flight. Its arrays belong to the caller and must stay until `vx_wait` has returned.
struct VxJob {
  const VxRecord* records;
  int32_t num_records;
  VxStep step;
  int32_t* tokens;                // step.tokens, writable: negative references are resolved in
                                  // place; null: there are none
  const int32_t* previous_ids;    // ids of the step before, or null
  int32_t num_previous_ids;
  double seconds;                 // out: time from the first to the last op
  double* record_seconds;         // out, added to: time of each record, or null
  int32_t done;                   // the team's own
};

VX_API VxTeam* vx_team_create(int32_t num_threads, size_t scratch_bytes);  // null: no memory or threads
VX_API void vx_team_destroy(VxTeam* team);      // waits for jobs that were submitted
VX_API int32_t vx_submit(VxTeam* team, VxJob* job);  // 0, or -1 when the queue is full
VX_API void vx_wait(VxTeam* team, VxJob* job);
