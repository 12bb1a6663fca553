"""Names the tensors of a checkpoint that the model does not read in the log."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable

from vllmx_core.errors import VllmxError, listing
from vllmx_core.model import Model, encoder_of
from vllmx_core.plugins.checkpoint import Checkpoint
from vllmx_core.weights.map import unread_names
from vllmx_core.weights.part import WeightSource

logger = logging.getLogger("vllmx.load")

_EXPECTED = re.compile(
    r"\.inv_freq$|position_ids$|^(model\.)?mtp[._]|\.(mtp|nextn|eh_proj|enorm|hnorm|shared_head)\."
    r"|(^|\.)(visual|vision|audio|image|video|multi_modal|mm_|embed_vision|embed_audio|connector)"
)
"""Buffers that are computed, layers of multi-token prediction, and towers that are not served."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_MAX_ZERO_BYTES = 1 << 20
_SHOWN = 5


def log_unread(model: Model, checkpoint: Checkpoint) -> None:
    """Logs one warning for unexpected tensors, and one line for those of parts that are not served.
    Vectors of zeros are left out: some quantisers add such biases."""
    encoder = encoder_of(model)
    specs = (*model.weights(), *(() if encoder is None else encoder.weights()))
    source = checkpoint.weights
    unread = unread_names(specs, source)
    layers = _layers_behind(checkpoint)
    expected = {name for name in unread if _EXPECTED.search(name) or layers(name)}
    if model.shape.output != "tokens":
        expected |= {name for name in unread if name.rpartition(".")[0].endswith("lm_head")}
    strange = {name for name in unread - expected if not _is_zero(source, name)}
    if strange:
        logger.warning(
            "tensors of the checkpoint that the model does not read: %s", _kinds(strange)
        )
    if expected:
        logger.info("tensors that are passed over: %s", _kinds(expected))


def _layers_behind(checkpoint: Checkpoint) -> Callable[[str], bool]:
    """Whether a tensor belongs to a layer of multi-token prediction, which follow the others."""
    config = checkpoint.config
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    count = config.get("num_hidden_layers")
    predicts = any(config.get(key) for key in _PREDICTION)

    def is_behind(name: str) -> bool:
        found = re.search(r"\.layers\.(\d+)\.", name)
        return predicts and found is not None and isinstance(count, int) and int(found[1]) >= count

    return is_behind


def _kinds(names: Iterable[str]) -> str:
    """Names with a star in place of the layer, and the count of each."""
    found = Counter(_NUMBER.sub("*", name) for name in sorted(names))
    return listing([name if n == 1 else f"{name} ({n})" for name, n in found.items()], _SHOWN)


def _is_zero(source: WeightSource, name: str) -> bool:
    try:
        part = source.part(name)
        if len(part.shape) != 1 or part.shape[0] * 4 > _MAX_ZERO_BYTES:
            return False
        return not part.dequantize().any()
    except VllmxError:  # such as an unsupported type
        return False
