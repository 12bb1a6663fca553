"""Host CPU of what happens between two steps when very much waits or one prompt is very long.

    python bench/host_cliffs.py [--repeat 7] [--clients 1000] [--aborts 16000] [--prompt 131056]

Each case runs on a core whose device answers at once. Figures are CPU milliseconds of the core's
thread (`time.thread_time`), median and range. The prefix cases look at blocks of 16 tokens.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from host import VOCAB_SIZE, InstantModel
from vllmx.bench.figures import show
from vllmx_core.config import EngineConfig
from vllmx_core.sampling import SamplingParams
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.wire.messages import CoreRequest, pack_ids

Case = Callable[[argparse.Namespace], float]
ADMITTED = 34
PENALTIES = {"frequency_penalty": 0.5}


def make_core(num_rows: int, length: int, num_blocks: int) -> EngineCore:
    config = EngineConfig(max_num_seqs=num_rows)
    model = InstantModel(num_blocks, 1 << 18)
    return EngineCore(model, config, max_model_len=length, vocab_size=VOCAB_SIZE)


def request(name: str, ids: np.ndarray[Any, Any], **fields: Any) -> CoreRequest:
    params = SamplingParams(max_tokens=None, temperature=0.0, **fields.pop("params", {}))
    return CoreRequest(
        request_id=name, prompt=pack_ids(ids), params=params, max_tokens=64, seed=0, **fields
    )


def random_ids(length: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, length).astype(np.int32)


def cpu_ms(function: Callable[[], object]) -> float:
    gc.collect()  # the cores of earlier samples
    started = time.thread_time()
    function()
    return (time.thread_time() - started) * 1e3


def full_queue(clients: int, num_rows: int, *, one_client: bool = False) -> EngineCore:
    core = make_core(num_rows, 256, 16 * num_rows)
    for number in range(clients):
        ids = np.arange(number % 7, number % 7 + 20)
        name = "" if one_client else f"client-{number}"
        core.add(request(f"request-{number}", ids, client=name))
    return core


def admission(options: argparse.Namespace) -> float:
    """A step that admits 34 of the waiting clients."""
    return cpu_ms(full_queue(options.clients, ADMITTED)._scheduler.schedule)


def abort(core: EngineCore) -> float:
    """All that wait end in one call, as 34 others run."""
    core.step()
    running = {sequence.request_id for sequence in core._scheduler.running}
    names = [name for name in core.request_ids if name not in running]
    return cpu_ms(lambda: core.abort(names))


def abort_clients(options: argparse.Namespace) -> float:
    """All waiting requests of as many clients are aborted at once while others run."""
    return abort(full_queue(options.aborts, ADMITTED))


def abort_client(options: argparse.Namespace) -> float:
    """All waiting requests of one client are aborted at once while others run."""
    return abort(full_queue(options.aborts, ADMITTED, one_client=True))


def long_prompt(options: argparse.Namespace, **fields: Any) -> float:
    """Measures the way of a prompt from the bytes of a message to a sequence that waits."""
    core = make_core(2, options.prompt + 100, options.prompt // 16 + 16)
    message = msgspec.msgpack.encode(request("long", random_ids(options.prompt), **fields))
    decoder = msgspec.msgpack.Decoder(CoreRequest)
    return cpu_ms(lambda: core.add(decoder.decode(message)))


def long_prompt_with_penalties(options: argparse.Namespace) -> float:
    """The same where the prompt's tokens are counted."""
    return long_prompt(options, params=PENALTIES)


def prefix_lookups(options: argparse.Namespace) -> Iterator[float]:
    """The first and the second look at a prompt that is wholly cached."""
    core = make_core(2, options.prompt + 100, options.prompt // 16 + 16)
    ids = random_ids(options.prompt)
    core.add(request("first", ids))
    while "first" in core._scheduler.live:
        core.step()
    core.add(request("second", ids))
    scheduler = core._scheduler
    sequence = scheduler.live["second"]
    for _ in range(2):
        yield cpu_ms(lambda: scheduler.blocks.wanted(sequence, scheduler.prefixes.look(sequence)))


def first_lookup(options: argparse.Namespace) -> float:
    """The first look at a prompt that is wholly cached."""
    return next(prefix_lookups(options))


def second_lookup(options: argparse.Namespace) -> float:
    """Any later look at it."""
    return list(prefix_lookups(options))[1]


CASES: dict[str, tuple[Case, float]] = {
    "admit 34 clients": (admission, 0.5),
    "abort, many clients": (abort_clients, 30.0),
    "abort, one client": (abort_client, 30.0),
    "long prompt": (long_prompt, 0.5),
    "long prompt, penalties": (long_prompt_with_penalties, 0.5),
    "cached prefix, first look": (first_lookup, 0.3),
    "cached prefix, each later look": (second_lookup, 0.3),
}
"""The cases with their targets in ms."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--clients", type=int, default=1000, help="that wait for admission")
    parser.add_argument("--aborts", type=int, default=16_000)
    parser.add_argument("--prompt", type=int, default=131_056, help="tokens of the long prompt")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    records: list[dict[str, float | int | str]] = []
    for name, (case, target_ms) in CASES.items():
        times = [case(options) for _ in range(options.repeat)]
        records.append(
            {
                "case": name,
                "median_ms": round(statistics.median(times), 3),
                "min_ms": round(min(times), 3),
                "max_ms": round(max(times), 3),
                "target_ms": target_ms,
            }
        )
    print(show(records, as_json=options.json))


if __name__ == "__main__":
    main()
