"""Specs that plugins return: frozen descriptions whose implementation is named, not imported.

`implementation` is "package.module:attribute"; it is imported on first use, so that registering a
plugin costs nothing. `api` is the protocol version it was written for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from vllmx_core.errors import PluginError

API_VERSION = 1
"""Version of the protocols between core and plugins; a spec names the one it was made for."""


@dataclass(frozen=True, slots=True)
class _Spec:
    name: str
    implementation: str

    def load(self) -> Any:
        """Imports and returns the implementation; raises PluginError that names it."""
        return self._load(self.implementation)

    def _load(self, reference: str) -> Any:
        module_name, _, attribute = reference.partition(":")
        try:
            return getattr(import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise PluginError(
                f"{type(self).__name__} {self.name!r}: cannot import {reference!r}"
                f" ({error}); reinstall the package that provides it"
            ) from error


@dataclass(frozen=True, slots=True)
class BackendSpec(_Spec):
    """A device backend.

    `probe` is "package.module:attribute" of a cheap function without heavy imports that returns
    None when the backend can run here, or else one sentence that says why not and what to do.
    `priority`: the greatest among those that can run wins under `--backend auto`.
    """

    probe: str
    priority: int
    summary: str = ""
    fixed_sums: bool = False
    """True if a row of a product depends only on that row and the weights, to the last bit, and not
    on the number of rows or columns: `--deterministic` needs that."""
    own_devices: bool | str = False
    """True if each rank of a model has its own device and memory, or the "package.module:function"
    that decides it, if it depends on the device."""
    api: int = API_VERSION

    def unavailable_reason(self) -> str | None:
        """None when it can run here."""
        reason: str | None = _Spec(self.name, self.probe).load()()
        return reason

    def has_own_devices(self) -> bool:
        """See `own_devices`. Raises what loading a model raises where there is no device."""
        if isinstance(self.own_devices, bool):
            return self.own_devices
        found: bool = self._load(self.own_devices)()
        return found


@dataclass(frozen=True, slots=True)
class ModelSpec(_Spec):
    """A model architecture: a class constructed with the parsed config.json."""

    architectures: tuple[str, ...]
    """Values of config.json's `architectures` that it serves."""
    model_types: tuple[str, ...] = ()
    """Values of `model_type`, for configs without architectures."""
    gguf_names: tuple[str, ...] = ()
    """Values of a GGUF file's `general.architecture` that it serves."""
    gguf: str = ""
    """"package.module:attribute" of its form in such files, a
    `vllmx_models.formats.gguf.architecture.GGUFArchitecture`."""
    backends: tuple[str, ...] = ()
    """Backends that have all its ops, as the tests of its plugin find; none where none is named."""
    checked: tuple[str, ...] = ()
    """A description by the plugin of what its tests compare."""
    gguf_among: tuple[str, ...] = ()
    """Values of `general.architecture` that another spec serves and whose files may hold it."""
    text_types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of `model_type` of a text model inside a multimodal config that it serves, each with
    values for keys that such a config may omit."""
    around: tuple[str, ...] = ()
    """Values of `model_type` of the text models that a multimodal model can have; one with another
    text model is served as that alone. Empty: it does not choose."""
    api: int = API_VERSION

    def load_gguf(self) -> Any:
        """Imports and returns what `gguf` names; raises PluginError."""
        return self._load(self.gguf)


@dataclass(frozen=True, slots=True)
class ModelImplSpec(_Spec):
    """Code for architectures without a plugin of their own, selected by `--model-impl`: a class
    that is constructed with the parsed config.json and is a `vllmx_core.model.Model`, or raises
    UnsupportedModelError."""

    backend: str
    """The only backend that runs its models."""
    probe: str
    """"module:function" that says why it cannot run here, see `BackendSpec.probe`."""
    cost: str
    """The cost, for the log line that says what runs a model: "slower, ..."."""
    api: int = API_VERSION

    def unavailable_reason(self) -> str | None:
        """None when it can run here."""
        reason: str | None = _Spec(self.name, self.probe).load()()
        return reason


@dataclass(frozen=True, slots=True)
class WeightFormatSpec(_Spec):
    """A checkpoint format: a callable `open(path: Path) -> Checkpoint`.

    `patterns` are globs of file names; a folder that holds a match, or a file that is one, is
    opened by this format. `priority` decides when several match. A format whose files name weights
    in their own way `needs_registry` to find the architectures that know them: its callable is
    `open(path, registry)`. `tower` is "package.module:attribute" of what puts a tower from a file
    of its own before a text model, `(checkpoint, path: Path | None) -> Checkpoint`; without a path
    it looks for the file itself. `adapter` reads a LoRA adapter: `(path: Path, registry, config:
    Mapping) -> vllmx_core.adapters.Adapter`, `config` being the base model's.
    """

    patterns: tuple[str, ...]
    priority: int = 0
    needs_registry: bool = False
    tower: str = ""
    adapter: str = ""
    api: int = API_VERSION

    def load_adapter(self) -> Any:
        """Imports and returns what `adapter` names; raises PluginError."""
        return self._load(self.adapter)

    def load_tower(self) -> Any:
        """Imports and returns what `tower` names; raises PluginError."""
        return self._load(self.tower)


@dataclass(frozen=True, slots=True)
class QuantizationSpec(_Spec):
    """A quantisation scheme of config.json's `quantization_config.quant_method`: a callable
    `(source: WeightSource, config: Mapping) -> WeightSource` whose parts carry its layout."""

    api: int = API_VERSION


@dataclass(frozen=True, slots=True)
class QuantizerSpec(_Spec):
    """A type that `--isq` quantises a dense checkpoint to while it loads: a callable
    `(name: str, checkpoint: Checkpoint, model: Model, registry: Registry) -> WeightSource` whose
    matrices carry the type's layout and are made when they are read."""

    api: int = API_VERSION


@dataclass(frozen=True, slots=True)
class EncoderSpec(_Spec):
    """Fast code for quantised types: a callable `() -> vllmx_core.weights.encoding.Encoder` that
    raises BackendUnavailableError where it cannot run. Among encoders that make a type, the one of
    the greatest `priority` is used; numpy makes the remaining types."""

    priority: int = 0
    api: int = API_VERSION


@dataclass(frozen=True, slots=True)
class ExecutorSpec(_Spec):
    """Runs a model on several ranks: a callable `(found, opened) -> LoadedModel` of a
    `vllmx_engine.core.found_model.FoundModel` and a `vllmx_engine.core.load.OpenedModel`. The one
    named "tensor-parallel" is asked where `--tensor-parallel-size` is above 1."""

    api: int = API_VERSION


@dataclass(frozen=True, slots=True)
class CommandSpec(_Spec):
    """A sub-command of `vllmx`: a click.Command."""

    help: str = ""
    api: int = API_VERSION


@dataclass(frozen=True, slots=True)
class ModelSourceSpec(_Spec):
    """Finds the files of a model name: a callable `(model: str, revision: str | None, progress:
    bool) -> Path | None`, None when the name is not its own. Sources are asked in the order of
    falling `priority`."""

    priority: int = 0
    api: int = API_VERSION


@dataclass(frozen=True, slots=True)
class ParserSpec(_Spec):
    """An `vllmx_core.output_format.OutputFormat` of a family of models, which `--tool-parser` and
    `--reasoning-parser` name.

    Without those flags a format matches if the chat template contains all of its texts; the match
    with the longest texts is used. Empty: it is used only by name.
    """

    tool_signature: tuple[str, ...] = ()
    reasoning_signature: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Other names, those of other servers above all."""
    api: int = API_VERSION


@dataclass(frozen=True, slots=True)
class ApiSpec(_Spec):
    """An API of the HTTP server: a `vllmx_server.generating.api.Api`, which is made with the
    server's ServerConfig while the model loads."""

    switch: str = ""
    """The boolean setting of ServerConfig that switches it on; empty: it is always on. Only then is
    the implementation imported."""
    by_name: bool = False
    """It is on only where `--apis` has its name. Its routes then replace those of APIs that are
    always on."""
    api: int = API_VERSION


@dataclass(frozen=True, slots=True)
class KVConnectorSpec(_Spec):
    """A shared store for KV blocks, which `--kv-connector NAME:ADDRESS` names: a callable
    `(address: str, namespace: str) -> vllmx_core.kv_connector.KVConnector` that does not wait for
    the store."""

    api: int = API_VERSION


Spec = (
    BackendSpec
    | ModelSpec
    | ModelImplSpec
    | WeightFormatSpec
    | QuantizationSpec
    | QuantizerSpec
    | EncoderSpec
    | ExecutorSpec
    | CommandSpec
    | ModelSourceSpec
    | ParserSpec
    | ApiSpec
    | KVConnectorSpec
)
