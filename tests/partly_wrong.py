"""A drafter that knows what comes, but for every third token."""

from __future__ import annotations

from collections.abc import Sequence as List

from vllmx_engine.core.drafters import Guess
from vllmx_engine.core.sequence import Sequence


class PartlyWrong:
    """Drafts the answers to prompts, and in place of every third token another one."""

    def __init__(self, prompts: List[List[int]], answers: List[List[int]]) -> None:
        pairs = zip(prompts, answers, strict=True)
        self._texts = {tuple(prompt): [*prompt, *answer] for prompt, answer in pairs}

    def guess(self, sequence: Sequence, most: int) -> Guess:
        known = sequence.tokens.tolist()
        text = self._texts[tuple(known[: sequence.num_prompt])]
        places = range(len(known), min(len(known) + most, len(text)))
        return Guess([int(not text[place]) if place % 3 == 0 else text[place] for place in places])

    def ended(self, sequence: Sequence) -> None:
        pass
