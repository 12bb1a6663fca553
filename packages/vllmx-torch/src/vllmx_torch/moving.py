"""Copies of KV blocks and state slots, for `vllmx_core.backend.HasMovableCache`. All work is
enqueued on the stream of the steps, whose order it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from vllmx_core.plan import I32, U8

from vllmx_torch.kv_cache import LayerPages

View = tuple[Tensor, int]
"""A tensor, and the dimension in which its rows are counted."""


def block_views(pages: Sequence[LayerPages], num_blocks: int) -> list[View]:
    """(K, blocks, P ...) of all keys, values and scales; those that layers share once."""
    found: dict[int, View] = {}
    for half in (half for page in pages for half in (page.k, page.v)):
        for tensor in (half.data, half.scales):
            if tensor is not None and tensor.numel():
                found[tensor.data_ptr()] = tensor.unflatten(1, (num_blocks, -1)), 1
    return list(found.values())


class TorchCopy:
    """A `CopyOut` of gathered tensors, each (n, ...)."""

    def __init__(self, parts: Sequence[Tensor], count: int) -> None:
        self._parts, self._count = parts, count

    @torch.inference_mode()
    def result(self) -> U8:
        """See `vllmx_core.backend.CopyOut.result`."""
        if not self._parts:  # a model may keep states alone
            return np.zeros((self._count, 0), np.uint8)
        flat = [part.flatten(1).contiguous().view(torch.uint8) for part in self._parts]
        data: U8 = torch.cat(flat, 1).cpu().numpy()
        return data


class TorchRows:
    """`vllmx_core.backend.MovableRows` of tensors."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views

    @torch.inference_mode()
    def copy_out(self, rows: I32) -> TorchCopy:
        """See `vllmx_core.backend.MovableRows.copy_out`."""
        index = torch.from_numpy(rows.astype(np.int64))
        taken = [view.index_select(at, index.to(view.device)) for view, at in self._views]
        dims = (at for _, at in self._views)
        parts = [one.movedim(at, 0) for one, at in zip(taken, dims, strict=True)]
        return TorchCopy(parts, len(rows))

    @torch.inference_mode()
    def copy_in(self, rows: I32, data: U8) -> None:
        """See `vllmx_core.backend.MovableRows.copy_in`."""
        index, begin = torch.from_numpy(rows.astype(np.int64)), 0
        for view, at in self._views:
            shape = list(view.movedim(at, 0).shape[1:])
            size = view.nbytes // view.shape[at]
            part = torch.from_numpy(np.ascontiguousarray(data[:, begin : begin + size]))
            values = part.view(view.dtype).reshape(len(rows), *shape).to(view.device)
            view.index_copy_(at, index.to(view.device), values.movedim(0, at))
            begin += size
