"""Perplexity of a model on texts, by the type that it is quantised to and that of its KV cache.

    python bench/perplexity.py                            # the demo model on stories of its kind
    python bench/perplexity.py --book-ends corpus/standardebooks     # what it was not trained on
    python bench/perplexity.py MODEL --text a.txt,b.txt --types bf16,q8_0,q4_k_m --json
    python bench/perplexity.py --types bf16 --caches f32 bf16 int8 fp8 q8,q4 q4

A text is cut where <|endoftext|> stands, and each piece into windows of `--width` tokens, every
token but the first of a window being predicted from those before it in the window: the figure is
exp of the mean negative log-probability. bf16 is the model as it is, the others are `--isq` types.
The public API computes it: prompt_logprobs of `LLM.generate`, on the backend of `--backend`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllmx import LLM, SamplingParams

PLAIN = "bf16"
TYPES = (
    PLAIN, "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0",
    "q3_k_l", "q3_k_m", "q3_k_s", "q2_k", "int8", "fp8",
)  # fmt: skip
END = "<|endoftext|>"
TRAINING = Path(__file__).resolve().parents[1] / "packages" / "vllmx-demo" / "train"
STORY_SEED = 987654
"""A seed which is none of those that made the training data."""


@dataclass(frozen=True)
class Figure:
    """One type of one model on one text."""

    type: str
    cache: str
    perplexity: float
    tokens: int
    """Predicted ones."""
    weight_bytes: int
    token_bytes: float
    """Bytes of a token in the KV cache."""
    seconds: float


def stories(count: int) -> str:
    """Texts as the demo model learnt them, with choices that it has not seen together."""
    sys.path.insert(0, str(TRAINING))
    from stories import story  # type: ignore[import-not-found]

    rng = random.Random(STORY_SEED)
    return END.join(story(rng)[0] for _ in range(count))


def book_ends(folder: Path) -> str:
    """The first 4,000 characters of the last 2 % of each book, which the training left out."""
    books = (path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt")))
    return END.join(book[int(len(book) * 0.98) :][:4000] for book in books)


def windows(llm: LLM, text: str, width: int) -> Iterator[list[int]]:
    """Token ids of all pieces, in windows of at least two tokens."""
    for piece in text.split(END):
        ids = llm.tokenizer.encode(piece.strip())
        for first in range(0, len(ids), width):
            if len(ids) - first > 1:
                yield ids[first : first + width]


def perplexity(llm: LLM, prompts: Sequence[list[int]]) -> tuple[float, int]:
    """The perplexity, and the number of tokens that were predicted."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    total, count = 0.0, 0
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params):
        if output.prompt_logprobs is None:
            raise RuntimeError(f"a prompt could not be scored: {output.error}")
        ids = output.prompt_token_ids
        for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            total -= entry[token].logprob
            count += 1
    return math.exp(total / count), count


def measure(model: str, isq: str, text: str, width: int, **options: Any) -> Figure:
    """Loads the model in this type and scores the text."""
    started = time.perf_counter()
    quantise = None if isq == PLAIN else isq
    with LLM(model, isq=quantise, enable_prefix_caching=False, **options) as llm:
        prompts = list(windows(llm, text, width))
        found, count = perplexity(llm, prompts)
        info = llm.info
        token = info.kv_cache_bytes / (info.num_kv_blocks * info.block_size)
    seconds = time.perf_counter() - started
    return Figure(isq, info.kv_cache_dtype, found, count, info.weight_bytes, token, seconds)


def table(figures: Sequence[Figure]) -> str:
    """Changes are relative to the first bf16 model."""
    plain = next((figure.perplexity for figure in figures if figure.type == PLAIN), None)
    lines = ["| type | weights, MB | cache | bytes a token | perplexity | change |", "|-" * 6 + "|"]
    for figure in figures:
        more = "" if plain is None else f"{(figure.perplexity / plain - 1) * 100:+.2f} %"
        model = f"{figure.type} | {figure.weight_bytes / 1e6:.2f}"
        cache = f"{figure.cache} | {figure.token_bytes:.0f}"
        lines.append(f"| {model} | {cache} | {figure.perplexity:.4f} | {more} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", default="demo")
    add("--text", default="", help="files, parted by commas; none: stories")
    add("--stories", type=int, default=200, help="how many, where no text is given")
    add("--book-ends", type=Path, help="folder of the books that the demo model has read")
    add("--types", default=",".join(TYPES), help=f"of {','.join(TYPES)}")
    add("--caches", nargs="+", default=["auto"], help="--kv-cache-dtype of each measurement")
    add("--width", type=int, default=512, help="tokens in a window")
    add("--backend", default="auto")
    add("--dtype", default="auto")
    add("--json", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    files = [Path(name) for name in options.text.split(",") if name]
    if options.book_ends is not None:
        text = book_ends(options.book_ends)
    else:
        text = END.join(file.read_text(encoding="utf-8") for file in files)
    text = text or stories(options.stories)
    limits = {"max_num_seqs": 16, "max_model_len": options.width + 1}
    limits |= {"backend": options.backend, "dtype": options.dtype}
    figures = []
    for name, cache in itertools.product(options.types.split(","), options.caches):
        limits["kv_cache_dtype"] = cache
        figures.append(measure(options.model, name, text, options.width, **limits))
        print(f"{name}, {cache}: {figures[-1].perplexity:.4f}", file=sys.stderr)
    if options.json:
        print(json.dumps([asdict(figure) for figure in figures]))
        return
    print(table(figures))
    print(f"\n{figures[0].tokens} tokens, windows of {options.width}")


if __name__ == "__main__":
    main()
