"""A core over the fake model whose requests follow grammars over letters."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import tokenizers
from tokenizers import models
from vllmx_core.config import EngineConfig
from vllmx_core.sampling import SamplingParams
from vllmx_engine.core.drafters import Guess
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.core.speculation import Drafting
from vllmx_engine.grammar.check import translate
from vllmx_engine.wire.grammars import FreePart, Grammar, GrammarSpec, Vocabulary
from vllmx_engine.wire.messages import CoreOutput, CoreRequest, TokenLogprobs, pack_ids
from vllmx_testing.fake import FakeLoadedModel, FakeRules

EOS = 7
LETTERS = '0123456-abcdefghijklmnopqrstuvwxyz{}:, "ABCDE'
TOKENS = [letter.encode() for letter in LETTERS]
TOKENS[EOS:EOS] = [b"</s>"]
VOCAB_SIZE = len(TOKENS)
RULES = FakeRules(vocab_size=VOCAB_SIZE)


def vocabulary(tokens: list[bytes] = TOKENS, eos: int = EOS) -> Vocabulary:
    """A token for each letter."""
    ids = {token.decode(): number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(ids, []))
    return Vocabulary(tokens=tokens, special_ids=[eos], eos_ids=[eos], tokenizer=backend.to_str())


def regex(pattern: str, free: FreePart | None = None) -> Grammar:
    return Grammar(translate(GrammarSpec(kind="regex", text=pattern)), free)


def text_of(ids: list[int]) -> str:
    return b"".join(TOKENS[token] for token in ids if token != EOS).decode()


class RepeatingDrafter:
    """Drafts known answers, with every seventh token wrong."""

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self._answers = answers

    def guess(self, sequence: Sequence, most: int) -> Guess:
        known = len(sequence.tokens) - sequence.num_prompt
        answer = self._answers[sequence.request_id]
        answer = [3 if place % 7 == 6 else token for place, token in enumerate(answer)]
        return Guess(answer[known:][:most])

    def ended(self, sequence: Sequence) -> None:
        pass


class Driver:
    """A core over the fake model, and what it said."""

    def __init__(
        self,
        *,
        rules: FakeRules = RULES,
        blocks: int = 64,
        stages: int = 1,
        slots: int | None = None,
        drafts: dict[str, list[int]] | None = None,
        **config: Any,
    ) -> None:
        """`drafts`: answers to draft, by the names of requests."""
        self.model = FakeLoadedModel(
            rules,
            num_blocks=blocks,
            block_size=4,
            max_tokens=32,
            max_logit_rows=32,
            num_stages=stages,
            num_state_slots=slots,
        )
        self.core = EngineCore(
            self.model,
            EngineConfig(**{"max_num_seqs": 8} | config),
            max_model_len=64,
            vocab_size=VOCAB_SIZE,
        )
        if drafts is not None:
            self.core.draft_with(Drafting(RepeatingDrafter(drafts), 5))
        self.core.set_vocabulary(vocabulary())
        self.ids: dict[str, list[int]] = defaultdict(list)
        self.logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.last: dict[str, CoreOutput] = {}
        self.longest = 0
        """Most tokens in one output."""

    def request(self, name: str, grammar: Grammar | None, **fields: Any) -> CoreRequest:
        params = {"temperature": 1.0, "max_tokens": 24} | fields.pop("params", {})
        return CoreRequest(
            request_id=name,
            prompt=pack_ids(fields.pop("prompt", [1, 2, 3])),
            params=SamplingParams(**params),
            max_tokens=params["max_tokens"],
            seed=fields.pop("seed", 5),
            stop_ids=fields.pop("stop_ids", [EOS]),
            grammar=grammar,
            **fields,
        )

    def add(self, name: str, grammar: Grammar | None, **fields: Any) -> None:
        self.core.add(self.request(name, grammar, **fields))

    def step(self) -> None:
        for output in self.core.step():
            self.ids[output.request_id] += output.ids
            self.longest = max(self.longest, len(output.ids))
            if output.logprobs is not None:
                assert len(output.logprobs) == len(output.ids)
                self.logprobs[output.request_id] += output.logprobs
            self.last[output.request_id] = output

    def run(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("it does not end")

    def text(self, name: str) -> str:
        assert self.last[name].finish_reason == "stop", self.last[name]
        return text_of(self.ids[name])
