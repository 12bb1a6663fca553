"""Runs fuzz targets under atheris (libFuzzer), for as long as one likes:

    python tests/fuzz/run.py gguf -max_total_time=600
    python tests/fuzz/run.py --changed gguf -max_total_time=600

The first feeds bytes to the target, starting from its seeds. The second lets libFuzzer steer the
target's own mutations, which stay well-formed further into the input. A target is a module
fuzz_NAME beside this one with `one_input(data: bytes)`, which lets only findings out, `seeds()`,
valid inputs, and `mutations()`, a strategy. The tests run the same targets for a moment, without
atheris.
"""

from __future__ import annotations

import importlib
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

MAX_ADDRESS_BYTES = 6 << 30
"""libFuzzer looks at resident memory only; a great allocation that nobody touches ends here."""
PACKAGES = ["vllmx_core", "vllmx_engine.text", "vllmx_models"]
DEFAULTS = ["-timeout=20", "-rss_limit_mb=2048"]


def mutated(target: ModuleType) -> Callable[[bytes], object]:
    """`one_input` on what hypothesis makes of libFuzzer's bytes."""
    from hypothesis import given, settings

    @settings(deadline=None, database=None)
    @given(target.mutations())
    def run(data: bytes) -> None:
        target.one_input(data)

    entry: Callable[[bytes], object] = run.hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    return entry


def main() -> None:
    import atheris

    arguments = sys.argv[1:]
    changed = arguments[0] == "--changed"
    name, *options = arguments[changed:]
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with atheris.instrument_imports(include=PACKAGES):
        target = importlib.import_module(f"fuzz.fuzz_{name}")
        for seed in target.seeds():
            target.one_input(seed)  # imports what is loaded on demand
    entry = mutated(target) if changed else target.one_input
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))

    def one_input(data: bytes) -> None:
        entry(data)

    with tempfile.TemporaryDirectory() as corpus:
        for index, seed in enumerate([] if changed else target.seeds()):
            Path(corpus, f"seed{index}").write_bytes(seed)
        atheris.Setup([sys.argv[0], corpus, *DEFAULTS, *options], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
