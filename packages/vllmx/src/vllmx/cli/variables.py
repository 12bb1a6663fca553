"""The environment variables that vllmx reads, and warnings of others that begin with VLLMX_.

Every field of a configuration record also has a variable `VLLMX_<NAME>`. Variables of plugins begin
with the distribution's name, VLLMX_ACME_... for `acme` and `vllmx-acme`, and are not checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import entry_points, requires

import click
from vllmx_core.config import EngineConfig
from vllmx_core.plugins.hooks import GROUP
from vllmx_core.plugins.registry import plugin_key
from vllmx_server.config import ServerConfig

PREFIX = "VLLMX_"
VARIABLES: Mapping[str, str] = {
    "VLLMX_CONFIG": "YAML file with flags, as --config",
    "VLLMX_CACHE_DIR": "where compiled CUDA kernels are kept",
    "VLLMX_CPU_ISA": "instruction set of the CPU backend instead of the best",
    "VLLMX_CUDA_DEVICE": "number of the GPU of the CUDA backend",
    "VLLMX_CUDA_UNFUSED": "a launch for every op (CUDA), for comparison: 1 on",
    "VLLMX_CUDA_WGMMA": "prompts by the tensor instructions of Hopper (CUDA): 1 on",
    "VLLMX_CUDA_ONE_SHOT": "sums of ranks through memory that GPUs share (CUDA): 0 never",
    "VLLMX_RANK_KEY": "the key of hosts with ranks or cores, in place of --rank-key-file",
    "VLLMX_TP_COMPARE": "1: ranks compare the ids that they draw, for debugging",
    "VLLMX_TORCH_DEVICE": "device of the torch backend",
    "VLLMX_METAL_RING": "sums of ranks by MLX's own group (Metal): 0 never",
    "VLLMX_METAL_PAGED_KERNEL": "Metal kernel for attention of decode rows: 0 never, 1 always",
    "VLLMX_METAL_PAGED_PREFILL": "Metal kernel for attention of prompts: 0 never, 1 always",
    "VLLMX_METAL_RECURRENCE": "Metal kernel for recurrent layers: 0 never, 1 always",
}
"""Environment variables other than those of configuration fields, with their meanings."""


def warn_of_unknown(environment: Iterable[str]) -> None:
    """Warns on standard error of each VLLMX_ variable that nothing reads."""
    fields = {
        field.name for cls in (EngineConfig, ServerConfig) for field in dataclasses.fields(cls)
    }
    ours = {re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requires("vllmx") or ()}
    plugins = {plugin_key(point).partition(":")[0] for point in entry_points(group=GROUP)}
    for line in warnings(environment, fields, plugins - ours):
        with contextlib.suppress(OSError):  # standard error is closed
            click.echo(f"warning: {line}", err=True)


def warnings(
    environment: Iterable[str], fields: Collection[str], distributions: Iterable[str]
) -> list[str]:
    """A line for each VLLMX_ variable that nothing reads. `fields`: those of all configuration
    records; `distributions`: those of other plugins."""
    known = {*VARIABLES, *(PREFIX + field.upper() for field in fields)}
    foreign = tuple(_prefix(name) for name in distributions)
    lines = []
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in known or name.startswith(foreign):
            continue
        endings = [each.removeprefix(PREFIX) for each in known]
        near = difflib.get_close_matches(name.removeprefix(PREFIX), endings, 1)
        hint = (
            f"did you mean {PREFIX}{near[0]}?" if near else "docs/serving.md lists those that are"
        )
        lines.append(f"the environment variable {name} is not read by vllmx: {hint}")
    return lines


def _prefix(distribution: str) -> str:
    name = distribution.upper().replace("-", "_").replace(".", "_")
    return PREFIX + name.removeprefix(PREFIX) + "_"
