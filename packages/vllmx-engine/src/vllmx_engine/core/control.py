"""Control of a loaded core by its operators: pausing, and new weights in place."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
from vllmx_core.errors import ConfigError, InvalidRequestError, ModelNotFoundError, VllmxError
from vllmx_core.model import Model, encoder_of

from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.core.load import OpenedModel, load_model, open_model
from vllmx_engine.wire.ipc import Call, Called, ErrorRecord
from vllmx_engine.wire.messages import CoreOutput, CoreRequest, CoreStats

logger = logging.getLogger("vllmx.core")


class CoreControl:
    """Answers calls, and holds requests that come while the core is paused.

    Args:
        found: the loaded model; None: it cannot be replaced.
    """

    def __init__(self, core: EngineCore, found: FoundModel | None) -> None:
        self._core = core
        self._found = found
        self._held: list[CoreRequest] | None = None
        """Requests for later; None while the core takes them."""

    def add(self, requests: Iterable[CoreRequest]) -> None:
        """Gives the choices of a call to the core, now or when it is resumed."""
        if self._held is not None:
            self._held += requests
            return
        for request in requests:
            self._core.add(request)

    def abort(self, request_ids: list[str]) -> None:
        """Ends requests that the core has, or that wait for it."""
        self._core.abort(request_ids)
        if self._held:
            gone = set(request_ids)
            self._held = [one for one in self._held if one.request_id not in gone]

    @property
    def held_ids(self) -> list[str]:
        """The ids of the requests that wait."""
        return [one.request_id for one in self._held or ()]

    def stats(self) -> CoreStats:
        """The core's counters, with the requests that wait until it is resumed."""
        stats = self._core.stats()
        num_waiting = stats.num_waiting + len(self._held or ())
        return msgspec.structs.replace(stats, num_waiting=num_waiting)

    def answer(self, call: Call) -> tuple[Called, list[CoreOutput]]:
        """Does what a client asks, and returns the updates of requests that this ended. An error is
        part of the answer."""
        ended: list[CoreOutput] = []
        try:
            return Called(call.call_id, self._do(call, ended)), ended
        except VllmxError as error:
            return Called(call.call_id, False, ErrorRecord.of(error)), ended

    def _do(self, call: Call, ended: list[CoreOutput]) -> bool:
        match call.what:
            case "reset_prefix_cache":
                return self._core.reset_prefix_cache()
            case "pause":
                return self._pause(call.text, ended)
            case "is_settled":  # or resumed meanwhile, which a further pause would undo
                return self._held is None or not self._core.has_work
            case "resume":
                return self._resume()
            case "end_session":
                return self._core.end_session(call.client, call.text)
            case "is_paused":
                return self._held is not None
            case "update_weights":
                self._update_weights(Path(call.text))
                return True

    def _pause(self, mode: str, ended: list[CoreOutput]) -> bool:
        """Returns True when no step will follow."""
        if self._held is None:
            self._held = []
            logger.info("paused (%s)", mode)
        if mode == "abort":
            ids = self._core.request_ids
            self._core.abort(ids)
            ended += [CoreOutput(request_id=one, ids=[], finish_reason="abort") for one in ids]
        self._core.pause(mode != "wait")
        return not self._core.has_work

    def _resume(self) -> bool:
        held, self._held = self._held, None
        self._core.pause(False)
        self.add(held or ())
        return True

    def _update_weights(self, path: Path) -> None:
        """Loads other weights of the same model. Raises what loading raises; then the old weights
        are loaded again."""
        found = self._found
        if found is None or self._core.has_draft_model:
            raise ConfigError(
                "the weights of a model that drafts by a model cannot be replaced: start it with"
                " --speculate off, ngram or suffix",
                param="path",
            )
        if found.config.takes_adapters:
            raise ConfigError(
                "weights cannot be replaced under LoRA adapters: start without them", param="path"
            )
        if found.config.has_kv_tiers:
            raise ConfigError(
                "weights cannot be replaced while lower tiers or other replicas keep KV blocks of"
                " the old ones: start without --kv-disk, --kv-connector, --kv-host-memory and"
                " --prefill-replicas",
                param="path",
            )
        if not path.exists():
            raise ModelNotFoundError(f"there is no folder or file {path}", param="path")
        new = replace(found, path=path)
        old_opened = open_model(found)
        old_opened.checkpoint.weights.close()
        opened, replaced = open_model(new), False
        try:
            _check_same(old_opened.model, opened.model, path)
            if not self._core.reset_prefix_cache():
                raise InvalidRequestError(
                    "requests are running: pause with mode=abort or mode=wait first"
                )
            replaced = True
            self._core.replace_model(lambda: load_model(new, self._as_loaded(opened)))
        except VllmxError:
            if replaced:
                logger.exception("the new weights cannot be loaded; the old ones are loaded again")
                again = open_model(found)
                self._core.replace_model(lambda: load_model(found, self._as_loaded(again)))
                again.checkpoint.weights.close()
            raise
        finally:
            opened.checkpoint.weights.close()
        self._found = new
        logger.info("weights of %s loaded in place", path)

    def _as_loaded(self, opened: OpenedModel) -> OpenedModel:
        """The model with the sizes that the core was made for."""
        info = self._core.model_info
        options = replace(
            opened.options,
            kv_cache_dtype=info.kv_cache_dtype,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            num_kv_blocks=info.num_kv_blocks,
            num_state_slots=info.num_state_slots or None,
        )
        return replace(opened, options=options)


def _check_same(old: Model, new: Model, path: Path) -> None:
    """Raises ConfigError unless both models have the same layers and vocabulary."""
    towers = encoder_of(old), encoder_of(new)
    specs = [() if one is None else one.weights() for one in towers]
    if (old.shape, old.weights(), specs[0]) != (new.shape, new.weights(), specs[1]):
        raise ConfigError(
            f"{path} is another model than the one that is loaded: only weights of the same shapes"
            " can take its place",
            param="path",
        )
