"""Calls between the ranks of a model, on tensors.

Ranks without a CUDA device speak through the memory that their processes share: their
parts go through the host in any case, all ranks add them in one order, and who waits there sees the
group's end. CUDA devices have NCCL, on the step's stream.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional
from vllmx_core.communicator import Communicator, HostRanks, RowRanks
from vllmx_core.errors import BackendUnavailableError, ConfigError, RankLostError
from vllmx_core.ops.all_gather import AllGather
from vllmx_core.ops.all_reduce import AllReduce
from vllmx_core.ops.op import Op
from vllmx_core.plan import AnyArray

_FOLDER_BYTES = 512
_PATIENCE = timedelta(minutes=10)
"""The patience of a call of NCCL; the watch over the processes ends a group long before."""


def host_ranks(communicator: Communicator, device: torch.device) -> HostRanks[Tensor]:
    """Ranks that meet through a communicator of the host."""

    def down(x: Tensor) -> AnyArray:
        found: AnyArray = x.cpu().numpy()
        return found

    return HostRanks(communicator, down, lambda array: torch.from_numpy(array).to(device))


class ProcessGroupRanks:
    """Ranks that meet through a process group of torch (`torch.distributed.ProcessGroup`) of this
    model alone; no global group is made. What they hand on to the next stage goes through the host.

    Args:
        host: for that.
    """

    def __init__(self, group: Any, host: HostRanks[Tensor]) -> None:
        self._group, self._host = group, host

    @classmethod
    def meet(cls, communicator: Communicator, kind: str) -> ProcessGroupRanks:
        """All ranks form a group; they learn by the communicator where its store is.

        Args:
            kind: "nccl", or "gloo" for tensors of the host.
        """
        rank, ranks = communicator.rank, communicator.num_ranks
        with tempfile.TemporaryDirectory(prefix="vllmx-ranks-") as own:  # one of them is used
            folder = _folder_of_rank_0(communicator, own)
            _check_one_host(communicator, folder)
            distributed: Any = torch.distributed
            store = distributed.FileStore(str(Path(folder) / "store"), ranks)
            try:
                if kind == "nccl":
                    options = distributed.ProcessGroupNCCL.Options()
                    options._timeout = _PATIENCE
                    group = distributed.ProcessGroupNCCL(store, rank, ranks, options)
                else:
                    options = distributed.ProcessGroupGloo._Options()
                    device = distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")
                    options._devices, options._timeout = [device], _PATIENCE
                    group = distributed.ProcessGroupGloo(store, rank, ranks, options)
            except AttributeError as error:
                raise BackendUnavailableError(
                    f"this torch ({torch.__version__}) was built without {kind}, which ranks on"
                    " CUDA devices need: install one with it, or leave out --tensor-parallel-size"
                ) from error
            device = torch.device("cuda" if kind == "nccl" else "cpu")
            found = cls(group, host_ranks(communicator, device))
            first = torch.ones(1, device=device)
            found.all_reduce(first)  # which connects them, so that the store is needed no more
            communicator.all_reduce(np.ones(1, np.float32))
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `ArrayRanks.all_reduce`."""
        x = x.contiguous()
        self._wait(lambda: self._group.allreduce([x]))
        return x

    def sum_rows(self, x: Tensor, held: Tensor) -> Tensor:
        """See `RowRanks.sum_rows`. Rows that somebody holds go from rank to rank; the host waits
        for their numbers."""
        rank, ranks, host = self._group.rank(), self._group.size(), held.cpu()
        stretches = host.tensor_split(ranks)  # of tokens, a rank's to add
        sent = [int(part[:, rank].sum()) for part in stretches]
        mine = stretches[rank]
        came = [int(count) for count in mine.sum(0)]
        theirs = x.new_empty(sum(came), x.shape[1])
        own = x[held[:, rank]].contiguous()
        options = torch.distributed.AllToAllOptions()
        self._wait(lambda: self._group.alltoall_base(theirs, own, came, sent, options))
        total = x.new_zeros(len(mine), x.shape[1])
        for part, has in zip(theirs.split(came), mine.T, strict=True):
            total[has.to(x.device)] += part
        return self.all_gather(total.T, [len(part) for part in stretches]).T.contiguous()

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See `ArrayRanks.all_gather`. Parts are made equally wide on the way."""
        widest = max(widths)
        padded = functional.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths]
        self._wait(lambda: self._group.allgather([parts], [padded]))
        return torch.cat(
            [part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1
        )

    def send(self, x: Tensor) -> None:
        """See `ArrayRanks.send`."""
        self._host.send(x)

    def recv(self, shape: tuple[int, ...]) -> Tensor:
        """See `ArrayRanks.recv`."""
        return self._host.recv(shape)

    @staticmethod
    def _wait(call: Any) -> None:
        try:
            call().wait()
        except RuntimeError as error:
            raise RankLostError(f"a call between ranks failed: {error}") from error


def _folder_of_rank_0(communicator: Communicator, own: str) -> str:
    row = np.zeros((1, _FOLDER_BYTES), np.uint8)
    data = own.encode()
    row[0, : len(data)] = np.frombuffer(data, np.uint8)
    folders = communicator.all_gather(row, [_FOLDER_BYTES] * communicator.num_ranks)
    return bytes(folders[0, :_FOLDER_BYTES]).rstrip(b"\0").decode()


def _check_one_host(communicator: Communicator, folder: str) -> None:
    """All ranks look, so that all refuse together and none is waited for."""
    seen = communicator.all_reduce(np.array([Path(folder).is_dir()], np.float32))
    if seen[0] < communicator.num_ranks:
        raise ConfigError(
            "ranks of torch on CUDA devices must be on one host: leave out --rank-hosts, or choose"
            " --backend cpu",
            param="rank_hosts",
        )


def ranks_of(
    communicator: Communicator | None, device: torch.device, ops: Sequence[Op]
) -> RowRanks[Tensor] | None:
    """The calls between ranks of a model with these ops on that kind of device; None for a model of
    one rank. Stages of a model speak through the host."""
    if communicator is None:
        return None
    meets = any(isinstance(op, AllReduce | AllGather) for op in ops)
    if device.type == "cuda" and meets:
        torch.cuda.set_device(device)
        return ProcessGroupRanks.meet(communicator, "nccl")
    return host_ranks(communicator, device)
