"""Bugs in sums over ranks that read each other's memory."""

from __future__ import annotations

from .bug import Bug

TEST = "test_cuda_one_shot.py:forward"
SOURCE = "one_shot.cu"
BUGS = (
    Bug(SOURCE, "a rank tells by a plain store that it has arrived",
        "vx_store_release(arrived(p, threadIdx.x, p.rank), call);",
        "*arrived(p, threadIdx.x, p.rank) = call;", TEST),
    Bug(SOURCE, "the word that is acquired is another one", "(int)(vx_load_acquire(word) - call)",
        "(int)(vx_load_acquire(stop) - vx_load_acquire(stop) + *(volatile const u32*)word - call)",
        TEST),
    Bug(SOURCE, "no barrier before a rank tells that its part lies there",
        "  __syncthreads();  // all of the row lies there, and all know the call\n",
        "  __syncwarp();\n", TEST),
    Bug(SOURCE, "no barrier before parts are read",
        "  __syncthreads();  // all others have arrived\n", "  __syncwarp();\n", TEST),
    Bug(SOURCE, "one buffer for all calls", "(size_t)(call & 1)", "(size_t)(call & 0)", TEST),
    Bug(SOURCE, "blocks share a slot", "* p.blocks + blockIdx.x) * p.slot", "* p.blocks) * p.slot",
        TEST),
    Bug(SOURCE, "calls of all blocks are counted together",
        "(u32*)p.at[p.rank] + blockIdx.x", "(u32*)p.at[p.rank]", TEST),
    Bug(SOURCE, "counts that wrap", "(int)(vx_load_acquire(word) - call) < 0",
        "vx_load_acquire(word) < call", TEST),
    Bug(SOURCE, "nobody loses patience", "if (looks == patience) vx_store_release(stop, 1u);", "",
        TEST),
    Bug(SOURCE, "the host's word is not looked at", "if (vx_load_acquire(stop)) return false;", "",
        TEST),
    Bug(SOURCE, "parts are read that never came", "atomicOr(lost, 1u);", "{}", TEST),
    Bug(SOURCE, "the last rank's part is left out", "    if (rank < p.ranks)\n#pragma",
        "    if (rank < p.ranks - 1)\n#pragma", TEST),
    Bug(SOURCE, "the residual is left out", "from_float<elem>(sum[j] + before[j])",
        "from_float<elem>(sum[j])", TEST),
    Bug("row_norm.h", "the norm of the row before", "load(v, row + i);", "load(v, out + i);", TEST),
)  # fmt: skip
