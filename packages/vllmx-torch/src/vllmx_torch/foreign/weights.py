"""A checkpoint's tensors for transformers' loader, which knows how a module's are made of them.

The loader is given our opened checkpoint instead of file names, so that nothing is unpickled,
downloaded or imported; it renames, merges experts and ties. What it then misses or has left over is
an error here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllmx_core.errors import WeightFormatError, listing, shown
from vllmx_core.weights.part import WeightPart, WeightSource, is_plain

from vllmx_torch.foreign.attention import NAME
from vllmx_torch.foreign.config import refusal
from vllmx_torch.foreign.model import TransformersModel
from vllmx_torch.weights import tensor_of

_DERIVED = re.compile(r"(^|\.)(inv_freq|masked_bias|position_ids)$")
"""Tables that old checkpoints hold and modules make themselves."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that is read when the loader slices it, as it slices those of safetensors."""

    part: WeightPart

    def __getitem__(self, index: Any) -> Tensor:
        part = self.part
        raw = part.stored().buffers["weight"] if is_plain(part) else None
        if raw is not None and not raw.dtype.startswith("f8"):
            return tensor_of(raw.view(), raw.dtype)[index]
        values = torch.from_numpy(part.dequantize())
        # gpt-oss stores MXFP4 experts by output features, and plain ones by input features.
        return (values.mT if part.layout.is_mxfp4 and values.ndim == 3 else values)[index]


def load_module(
    model: TransformersModel, source: WeightSource, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """The module with its weights, on the device. Raises WeightFormatError for tensors that are
    missing, left over or of another shape."""
    cls = model.module_class
    stored = {name: StoredTensor(source.part(name)) for name in source.names()}
    stored = {name: each for name, each in stored.items() if not _DERIVED.search(name)}
    try:
        with _quiet():
            module, info = cls.from_pretrained(
                None,
                config=model.config,
                state_dict=stored,
                dtype=dtype,
                attn_implementation=NAME if model.layers else None,
                ignore_mismatched_sizes=True,  # they are reported, and an error below
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
    except WeightFormatError:
        raise
    except Exception as error:  # the loader and the converters of each model raise anything
        raise WeightFormatError(
            refusal(f"transformers cannot load {cls.__name__}", error).message
        ) from error
    _check(cls.__name__, info)
    loaded: nn.Module = module.eval().requires_grad_(False).to(device)
    return loaded


def _check(name: str, info: Mapping[str, Any]) -> None:
    problems = [
        f"{what} {listing(names, 5)}"
        for what, names in (
            ("lacks", sorted(map(shown, info["missing_keys"]))),
            ("has what the model has no place for:", sorted(map(shown, info["unexpected_keys"]))),
            ("has another shape than the model of", _first_of(info["mismatched_keys"])),
        )
        if names
    ]
    if problems:
        raise WeightFormatError(
            f"the checkpoint {'; it '.join(problems)}: config.json and weights do not belong"
            f" together, or transformers' {name} is another model"
        )


def _first_of(keys: Iterable[Any]) -> list[str]:
    """Names of keys that are names or tuples of a name and shapes."""
    return sorted(shown(str(key[0] if isinstance(key, tuple) else key)) for key in keys)


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers reports loading in tables and progress bars of its own; what matters of it
    becomes an error above."""
    from transformers.utils import logging

    reports: Any = logging

    level, bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity_error()
    reports.disable_progress_bar()
    try:
        yield
    finally:
        reports.set_verbosity(level)
        if bars:
            reports.enable_progress_bar()
