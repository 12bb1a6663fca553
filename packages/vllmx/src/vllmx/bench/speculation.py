"""Speed and acceptance of drafters next to plain decoding, with equal answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllmx_core.records import Record
from vllmx_engine.core.drafters import Guess, SuffixDrafter
from vllmx_engine.llm import LLM
from vllmx_engine.wire.messages import pack_ids

if TYPE_CHECKING:
    from vllmx_core.sampling import SamplingParams
    from vllmx_engine.core.sequence import Sequence as LiveSequence

PLAIN, SIMULATED = "off", "simulated"
_SHOWN = 4
"""Places of a draft with a column."""


class SimulatedDrafter:
    """Drafts known answers, of whose tokens a share is right: what a drafter would bring that
    accepts so many and costs nothing."""

    def __init__(self, answers: dict[bytes, list[int]], acceptance: float) -> None:
        self._answers = answers
        self._acceptance = acceptance
        self._rng = random.Random(0)  # noqa: S311 - a simulation

    def guess(self, sequence: LiveSequence, most: int) -> Guess:
        """See `vllmx_engine.core.drafters.Drafter`."""
        answer = self._answers[sequence.request.prompt]
        ids = answer[len(sequence.tokens) - sequence.num_prompt :][:most]
        for place, token in enumerate(ids):
            if self._rng.random() >= self._acceptance:
                ids[place] = max(0, token - 1) or token + 1
        return Guess(ids)

    def ended(self, sequence: LiveSequence) -> None:
        """See `vllmx_engine.core.drafters.Drafter`."""


class Run(Record):
    """Answers to all prompts, and what they took."""

    answers: list[list[int]]
    prompts: list[list[int]]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))


def _run(llm: LLM, prompts: Sequence[str], params: list[SamplingParams], together: int) -> Run:
    answers: list[list[int]] = []
    ids: list[list[int]] = []
    seconds = 0.0
    for start in range(0, len(prompts), together):
        part = slice(start, start + together)
        outputs = llm.generate(list(prompts[part]), params[part], use_tqdm=False)
        for output in outputs:
            answers.append(list(output.outputs[0].token_ids))
            ids.append(list(output.prompt_token_ids or ()))
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        begin = min(one.first_token_s or 0.0 for one in metrics)
        seconds += max(one.last_token_s or 0.0 for one in metrics) - begin
    return Run(answers, ids, seconds)


def speculation(
    config: dict[str, Any],
    drafters: Sequence[str],
    prompts: Sequence[str],
    *,
    output_len: int,
    temperature: float,
    together: int,
    repeat: int,
    acceptance: float | None,
) -> Iterator[dict[str, float | int | str]]:
    """Yields a row for plain decoding and one for each drafter: the median of `repeat` rounds.

    Args:
        config: fields of `EngineConfig`.
        together: prompts that run at once.
        acceptance: the share of right tokens of the drafter "simulated".
    """
    plain: Run | None = None
    for name in (PLAIN, *drafters):
        speculate = PLAIN if name == SIMULATED else name
        with LLM(**{**config, "speculate": speculate}) as llm:
            params = [
                llm.sampling_params(max_tokens=output_len, temperature=temperature, seed=number)
                for number in range(len(prompts))
            ]
            if name == SIMULATED and plain is not None:
                known = zip(map(pack_ids, plain.prompts), plain.answers, strict=True)
                drafter = SimulatedDrafter(dict(known), 0.8 if acceptance is None else acceptance)
                llm.draft_with(drafter, _num_tokens(config))
            _run(llm, prompts[:1], params[:1], 1)  # warm
            before = llm.stats()
            runs = []
            for _ in range(repeat):
                if name == "suffix":  # without the answers of the round before
                    llm.draft_with(SuffixDrafter(), _num_tokens(config))
                runs.append(_run(llm, prompts, params, together))
            runs.sort(key=lambda run: run.seconds)
            after = llm.stats()
        run = runs[len(runs) // 2]
        plain = plain or run
        drafts = after.num_drafts - before.num_drafts
        drafted = after.num_draft_tokens - before.num_draft_tokens
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        row: dict[str, float | int | str] = {
            "drafter": name,
            "tokens_per_s": round(run.num_tokens / run.seconds, 2),
            "ratio": round(plain.seconds / run.seconds, 3),
            "drafted": drafted,
            "accepted": round(accepted / drafted, 3) if drafted else 0.0,
            "equal": "yes" if run.answers == plain.answers else "no",
        }
        for place in range(_SHOWN):
            kept = after.accepted_at[place] - before.accepted_at[place]
            row[f"at_{place + 1}"] = round(kept / drafts, 3) if drafts else 0.0
        yield row


def _num_tokens(config: dict[str, Any]) -> int | None:
    count = config.get("speculate_tokens", "auto")
    return None if count == "auto" else int(count)


def default_prompts() -> list[str]:
    """Prose, lists and code that repeat themselves more or less."""
    story = "Once upon a time there was a little dog who lived in a big house. "
    code = (
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"
    )
    return [story, story * 3, code, "One, two, three, four. One, two, three, four. One, two,"]
