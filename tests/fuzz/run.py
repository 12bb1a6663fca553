"""Runs a fuzz target under atheris (libFuzzer), for as long as one likes:

    python tests/fuzz/run.py fuzz_gguf -max_total_time=600 -rss_limit_mb=1024

A target is a module beside this one with `one_input(data: bytes)`, which lets only findings out,
and `seed()`, a valid input. The tests run the same targets for a moment, without atheris.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path


def main() -> None:
    import atheris

    name, *options = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    with atheris.instrument_imports(include=["vllmx_core", "vllmx_engine.text", "vllmx_models"]):
        target = importlib.import_module(name)
        target.one_input(target.seed())  # imports what is loaded on demand

    def one_input(data: bytes) -> None:
        target.one_input(data)

    with tempfile.TemporaryDirectory() as corpus:
        Path(corpus, "seed").write_bytes(target.seed())
        atheris.Setup([sys.argv[0], corpus, *options], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
