"""The share of JSON schemas in some folders that answers can be held to, and whether these are
valid.

    python bench/schemas.py FOLDER ... [--most 300] [--answers 6] [--seed 0] [--json FILE]

Each schema is checked as the grammar process does. Where it passes, answers are drawn at random
from its masks, over the tokens of the demo model, and validated by `jsonschema`. A schema that is
refused counts under the words of its refusal; an answer that is not valid counts as broken, and the
command then ends with 1. Any package that ships schemas will do: unpack its wheel and name the
folder.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import msgspec
from output_file import output_file
from rich.console import Console
from rich.progress import track
from rich.table import Table
from vllmx_core.errors import VllmxError
from vllmx_core.structured import StructuredOutputsParams
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.grammar.check import check
from vllmx_engine.grammar.matcher import CompiledGrammar, allowed_ids
from vllmx_engine.grammar.spec import grammar_spec
from vllmx_engine.grammar.vocabulary import Lexicon, vocabulary_of
from vllmx_engine.text.tokenizer import Tokenizer

_MOST_TOKENS = 4000
_CLOSING = frozenset(b'"}],')


class Verdict(msgspec.Struct):
    """What became of one schema."""

    path: str
    refusal: str | None
    """Why it was refused; None: it can be held."""
    seconds: float
    """The time of the check."""
    valid: int = 0
    """The number of drawn answers that are valid."""
    endless: int = 0
    """The number of drawn answers that did not end within the tokens they had."""
    broken: str | None = None
    """An answer that is not valid, and why."""


def main() -> int:
    """Prints the table; 1 where an answer broke its schema."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=300, help="schemas, drawn at random")
    parser.add_argument("--answers", type=int, default=6, help="drawn from each schema")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=output_file, help="write all verdicts here")
    args = parser.parse_args()
    schemas = [one for folder in args.folders for one in _schemas(folder)]
    random.Random(args.seed).shuffle(schemas)
    tokenizer = Tokenizer.from_folder(MODEL_FOLDER)
    size = tokenizer.vocab_size
    lexicon = Lexicon.of(vocabulary_of(tokenizer, size, tokenizer.eos_token_ids))
    console = Console(stderr=True)
    verdicts = [
        _verdict(path, schema, tokenizer, lexicon, args.answers)
        for path, schema in track(schemas[: args.most], "schemas", console=console)
    ]
    if args.json:
        args.json.write_bytes(msgspec.json.encode(verdicts))
    _print(verdicts)
    return 1 if any(one.broken for one in verdicts) else 0


def _schemas(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """All files under `folder` that are objects with a schema's keywords."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        try:
            value = json.loads(path.read_bytes())
        except ValueError:
            continue
        if isinstance(value, dict) and {"properties", "$ref", "anyOf", "oneOf", "allOf"} & {*value}:
            found.append((path, value))
    return found


def _verdict(
    path: Path, schema: dict[str, Any], tokenizer: Tokenizer, lexicon: Lexicon, answers: int
) -> Verdict:
    start = time.perf_counter()
    try:
        spec = grammar_spec(StructuredOutputsParams(json=schema))
        text = check(spec, lexicon)
    except VllmxError as error:
        return Verdict(str(path), str(error), time.perf_counter() - start)
    verdict = Verdict(str(path), None, time.perf_counter() - start)
    grammar = CompiledGrammar(text, lexicon.trie, lexicon.vocab_size)
    validator = jsonschema.validators.validator_for(schema)(schema)
    for seed in range(answers):
        answer = _draw(grammar, tokenizer, seed)
        if answer is None:
            verdict.endless += 1
            continue
        try:
            validator.validate(json.loads(answer))
            verdict.valid += 1
        except (ValueError, jsonschema.ValidationError) as error:
            verdict.broken = f"{answer}: {error}"
    return verdict


def _draw(grammar: CompiledGrammar, tokenizer: Tokenizer, seed: int) -> str | None:
    """An answer of tokens drawn from the grammar's masks; those that close something are likely."""
    rng = random.Random(seed)
    matcher, mask = grammar.start(), grammar.first_mask.copy()
    ids: list[int] = []
    while len(ids) < _MOST_TOKENS and not matcher.is_stopped:
        matcher.fill_mask(mask)
        allowed = allowed_ids(mask).tolist()
        ends = [one for one in allowed if one in tokenizer.eos_token_ids]
        if ends and rng.random() < 0.5:
            break
        allowed = [one for one in allowed if one not in ends]
        closing = [one for one in allowed if _CLOSING.issuperset(tokenizer.token_bytes(one))]
        token = rng.choice(closing if closing and rng.random() < 0.7 else allowed)
        matcher.consume(token)
        ids.append(token)
    if not matcher.is_accepting:
        return None
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def _print(verdicts: list[Verdict]) -> None:
    console = Console(width=120)
    held = [one for one in verdicts if one.refusal is None]
    seconds = sorted(one.seconds for one in verdicts)
    console.print(
        f"{len(held)} of {len(verdicts)} schemas can be held;"
        f" {sum(one.valid for one in held)} answers are valid,"
        f" {sum(one.broken is not None for one in held)} schemas were broken,"
        f" {sum(one.endless for one in held)} answers did not end."
    )
    if seconds:
        console.print(
            f"A check takes {seconds[len(seconds) // 2] * 1000:.1f} ms in the median,"
            f" {seconds[-1] * 1000:.0f} ms at most."
        )
    reasons = Counter(
        re.sub(r"\bat \S+|\d+", "…", one.refusal)[:100] for one in verdicts if one.refusal
    )
    table = Table("refused", "schemas")
    for reason, count in reasons.most_common():
        table.add_row(reason, str(count))
    console.print(table)
    for one in held:
        if one.broken:
            console.print(f"BROKEN {one.path}: {one.broken[:600]}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
