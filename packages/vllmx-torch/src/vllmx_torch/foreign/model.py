"""A model that transformers describes: one op that runs its module."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from vllmx_core.dtypes import short_dtype
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.model import KVSpec, ModelShape, Ops, StateSpec, StepInputs, Weight
from vllmx_core.ops.values import Value
from vllmx_core.plan import AnyArray
from vllmx_core.weights.spec import WeightSpec

from vllmx_torch.foreign.config import longest_context, read_config, refusal
from vllmx_torch.foreign.op import RunModule
from vllmx_torch.foreign.survey import Layer, survey, survey_cache

logger = logging.getLogger("vllmx.torch")


class TransformersModel:
    """`vllmx_core.model.Model` that the backend "torch" runs and every other one refuses."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.module_class = read_config(config)
        self.layers: tuple[Layer, ...] = ()
        """The attention layers over vllmx's pages; none: the module keeps its own caches."""
        try:
            try:
                self.survey = survey(self.module_class, self.config)
                longest = longest_context(self.config)
                self.layers = self.survey.layers(longest)
            except UnsupportedModelError as error:
                self.survey = survey_cache(self.module_class, self.config)
                longest = longest_context(self.config, grows=self.survey.token_numbers > 0)
                logger.info(
                    "%s of transformers runs sequence by sequence over its own cache: %s",
                    self.architecture,
                    error.message,
                )
        except Exception as error:  # a module's code raises anything, ours says what it is
            if not isinstance(error, UnsupportedModelError):
                error = refusal("it cannot be built", error)
            raise UnsupportedModelError(
                f"{self.architecture} of transformers cannot run: {error.message}"
            ) from error
        text = self.config.get_text_config()
        dtype = str(getattr(self.config, "dtype", None) or "bfloat16").removeprefix("torch.")
        self._shape = ModelShape(
            self.survey.vocab_size,
            text.hidden_size,
            longest,
            tuple(
                KVSpec(layer.shape.num_kv_heads, layer.head_size, layer.window)
                for layer in self.layers
            ),
            short_dtype(dtype),
            states=self._states(longest),
        )

    @property
    def architecture(self) -> str:
        """The name of its class."""
        return self.module_class.__name__

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def shape_within(self, max_model_len: int) -> ModelShape:
        """The shape whose state slots hold caches of so many tokens at the most."""
        return replace(self._shape, states=self._states(max_model_len))

    def _states(self, max_model_len: int) -> tuple[StateSpec, ...]:
        numbers = self.survey.state_numbers + max_model_len * self.survey.token_numbers
        return () if self.layers else (StateSpec(1, 1, max(1, numbers)),)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Memory of the module."""
        return sum(self.survey.parameters) * dtype.itemsize

    def weights(self) -> tuple[WeightSpec, ...]:
        """None: which tensors a module has, and how they are made of those in files, is
        transformers' to say."""
        return ()

    def constants(self, max_model_len: int) -> Mapping[str, AnyArray]:
        return {}

    def forward(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Value:
        logits = Value(self._shape.vocab_size, "L", "f32")
        return ops.put(RunModule(self.architecture, logits)).out
