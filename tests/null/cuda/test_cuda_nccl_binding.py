"""`NcclRanks` through CuPy's own binding of NCCL, over a library that a C compiler makes: it has
NCCL's functions, notes their arguments and answers success. So what CuPy passes on is seen, with
neither a GPU nor NCCL's 200 MB."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = r"""
#include <stdio.h>
#include <string.h>
typedef struct { char internal[128]; } Id;
typedef void *Comm;
static char log_text[1 << 16];
#define NOTE(...) (sprintf(log_text + strlen(log_text), __VA_ARGS__), 0)
#define N(x) (size_t)(x)
const char *vx_log(void) { return log_text; }
int ncclGetUniqueId(Id *id) {
  for (int i = 0; i < 128; ++i) id->internal[i] = (char)(200 - i);
  return 0;
}
int ncclCommInitRankConfig(Comm *comm, int count, Id id, int rank, void *config) {
  unsigned char *bytes = (unsigned char *)id.internal;
  *comm = (Comm)(size_t)(rank + 1);
  return NOTE("init %d %d %d %d\n", count, rank, bytes[0], bytes[127]);
}
int ncclAllReduce(void *x, void *y, size_t n, int type, int op, Comm comm, void *stream) {
  return NOTE("allReduce %zu %zu %zu %d %d %zu\n", N(x), N(y), n, type, op, N(stream));
}
int ncclBroadcast(void *x, void *y, size_t n, int type, int root, Comm comm, void *stream) {
  return NOTE("broadcast %zu %zu %zu %d %d %zu\n", N(x), N(y), n, type, root, N(stream));
}
int ncclSend(void *x, size_t n, int type, int peer, Comm comm, void *stream) {
  return NOTE("send %zu %zu %d %d %zu\n", N(x), n, type, peer, N(stream));
}
int ncclRecv(void *x, size_t n, int type, int peer, Comm comm, void *stream) {
  return NOTE("recv %zu %zu %d %d %zu\n", N(x), n, type, peer, N(stream));
}
int ncclCommAbort(Comm comm) { return NOTE("abort\n"); }
int ncclCommDestroy(Comm comm) { return NOTE("destroy\n"); }
int ncclGroupStart(void) { return NOTE("group\n"); }
int ncclGroupEnd(void) { return NOTE("group end\n"); }
const char *ncclGetErrorString(int status) { return "an error"; }
int ncclGetVersion(int *version) { *version = 22703; return 0; }
int ncclAllGather(void) { return 5; }
int ncclBcast(void) { return 5; }
int ncclCommCount(void) { return 5; }
int ncclCommCuDevice(void) { return 5; }
int ncclCommGetAsyncError(void) { return 5; }
int ncclCommInitAll(void) { return 5; }
int ncclCommSplit(void) { return 5; }
int ncclCommUserRank(void) { return 5; }
int ncclReduce(void) { return 5; }
int ncclReduceScatter(void) { return 5; }
"""
PROGRAM = r"""
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
library.vx_log.restype = ctypes.c_char_p
from cupy.cuda import nccl
from vllmx_testing.ranks import RankThreads
from vllmx_cuda.device.device import Memory
from vllmx_cuda.device.nccl import NcclRanks
from vllmx_cuda.device.ranks import Ties
assert issubclass(nccl.NcclError, RuntimeError)
ranks = RankThreads(2, lambda end: NcclRanks(nccl, end, 77, Ties(exchanges=True)))
one, x, y = ranks.ranks[0], Memory(1000, 64, None), Memory(2000, 64, None)
one.all_reduce(x, y, 6, "bf16")
one.all_gather(x, y, [4, 3], "f32")
one.all_to_all(x, y, [2, 3], "f16")
one.close()
ranks.close()
print(library.vx_log().decode(), end="")
"""
CALLS = """\
allReduce 1000 2000 6 9 0 77
group
broadcast 1000 2000 4 7 0 77
broadcast 2016 2016 3 7 1 77
group end
group
send 1000 2 6 0 77
recv 2000 2 6 0 77
send 1004 3 6 1 77
recv 2004 2 6 1 77
group end
destroy
"""


def test_what_cupy_passes_on(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler for a shared library of Linux")
    (tmp_path / "nccl.c").write_text(LIBRARY)
    library = tmp_path / "libnccl.so.2"
    flags = ["-shared", "-fPIC", "-w", "-Wl,-soname,libnccl.so.2"]
    subprocess.run([compiler, *flags, str(tmp_path / "nccl.c"), "-o", str(library)], check=True)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    begun, calls = ran.stdout.splitlines()[:2], ran.stdout.splitlines(keepends=True)[2:]
    assert sorted(begun) == ["init 2 0 200 73", "init 2 1 200 73"]
    assert "".join(calls) == CALLS
