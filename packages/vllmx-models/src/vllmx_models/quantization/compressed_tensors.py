"""compressed-tensors, as llm-compressor writes it: which of its formats a module has.

`config_groups` map targets (the class "Linear", names, "re:" patterns; an exact name goes before a
pattern, a pattern before the class) to what its weights and activations are; `ignore` takes modules
out. `ct_weights` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vllmx_core.errors import UnsupportedModelError, listing
from vllmx_core.records import Record
from vllmx_core.weights.part import WeightPart, WeightSource

from vllmx_models.quantization.ct_weights import WeightArgs, read_activations, read_weight_args
from vllmx_models.quantization.modules import compiled
from vllmx_models.quantization.options import QuantReader
from vllmx_models.quantization.scaled import Options
from vllmx_models.quantization.source import ModuleTensors, QuantizedSource

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "dense",
)


def compressed_tensors(source: WeightSource, config: Mapping[str, Any]) -> QuantizedSource:
    """The scheme as a `QuantizationSpec` implementation; raises UnsupportedModelError."""
    return QuantizedSource(source, CompressedTensorsScheme(config))


class _Group(Record):
    targets: tuple[str, ...]
    weights: WeightArgs
    activations: Options

    def rank(self, module: str, source: str) -> int:
        """Specificity of the match: 3 by name, 2 by a pattern, 1 by the class, 0 not at all."""
        if module in self.targets:
            return 3
        patterns = (t.removeprefix("re:") for t in self.targets if t.startswith("re:"))
        if any(compiled(pattern, source).match(module) for pattern in patterns):
            return 2
        return int("Linear" in self.targets)


class CompressedTensorsScheme:
    name = "compressed-tensors"
    weight_suffix = ".weight"
    markers = (".weight_packed", ".weight_scale")
    companions = (
        ".weight_shape",
        ".weight_zero_point",
        ".weight_g_idx",
        ".weight_global_scale",
        ".input_scale",
        ".input_zero_point",
        ".input_global_scale",
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        read = QuantReader(config, self.name)
        read.choice("format", FORMATS, "dense")
        sparsity = QuantReader(read.mapping("sparsity_config"), "compressed-tensors sparsity")
        sparsity.choice("format", ("dense",), "dense")
        if read.mapping("transform_config").get("config_groups"):
            raise read.error("transform_config", "is not read here; known: none")
        self._source = read.source
        self._groups = _groups(read)
        if not self._groups:
            raise read.error("config_groups", "must say which weights are quantised")
        self._excluded = read.modules("ignore")
        self._group_of = lru_cache(None)(self._find_group)

    def excludes(self, module: str) -> bool:
        return self._excluded.match(module)

    def part(self, name: str, tensors: ModuleTensors) -> WeightPart:
        group = self._group_of(tensors.stem)
        return group.weights.part(name, tensors, group.activations)

    def _find_group(self, module: str) -> _Group:
        ranks = [group.rank(module, self._source) for group in self._groups]
        best = max(ranks)
        if best == 0:
            targets = [target for group in self._groups for target in group.targets]
            raise UnsupportedModelError(
                f"{self._source}: module {module!r} has quantised tensors, but no config group"
                f" targets it; known targets: {listing(targets)}"
            )
        return self._groups[ranks.index(best)]


def _groups(read: QuantReader) -> list[_Group]:
    """The groups that quantise weights."""
    groups = []
    for name, options in read.mapping("config_groups").items():
        if not isinstance(options, Mapping):
            raise read.error("config_groups", f"must have an object as {name}")
        source = f"{read.architecture} {name}"
        group = QuantReader(options, source)
        group.choice("format", FORMATS, "dense")
        if not group.has("weights"):
            continue
        weights = read_weight_args(QuantReader(group.mapping("weights"), f"{source} weights"))
        inputs = QuantReader(group.mapping("input_activations"), f"{source} input_activations")
        groups.append(_Group(tuple(group.words("targets")), weights, read_activations(inputs)))
    return groups
