"""Every architecture with recurrent layers as transformers saves it, through the public interface:
64 greedy ids are those of transformers, whatever the chunks are, of rows that lost their blocks,
behind every snapshot, in second turns, and beside a request that is aborted."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, AsyncLLM, EngineConfig, SamplingParams
from vllmx_core.errors import ConfigError
from vllmx_demo.source import MODEL_FOLDER

from tests.partly_wrong import PartlyWrong
from tests.usable_backends import backend_spec

from ..backend import test_recurrent_architectures as suites  # noqa: TID252 - no package to name

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODELS = [
    suites.TestQwen3Next,
    suites.TestQwen35,
    suites.TestQwen35Moe,
    suites.TestLfm2,
    suites.TestLfm2Moe,
    suites.TestNemotronH,
    suites.TestGraniteMoeHybrid,
    suites.TestBamba,
    suites.TestKimiLinear,
    suites.TestJamba,
    suites.TestMamba,
    suites.TestFalconMamba,
    suites.TestMamba2,
]
VOCAB_SIZE, LENGTH, BLOCK = 4096, 64, 16
PROMPTS = [np.random.default_rng(size).integers(3, 4096, size).tolist() for size in (37, 13, 50)]
CONFIG: dict[str, Any] = {
    "backend": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "num_kv_blocks": 40,
    "block_size": BLOCK,
    "state_snapshot_tokens": 1,
}
FEW_BLOCKS = 12
"""Three rows come to more."""


def greedy(max_tokens: int = LENGTH) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@dataclass(frozen=True)
class Saved:
    folder: str
    twin: Any

    def load(self, **config: Any) -> LLM:
        return LLM(self.folder, **CONFIG | config)

    def check(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        """Asserts that each id is the one that transformers finds likeliest behind the prompt and
        the ids before it: then they are those that it generates. One pass over all, for nobody sees
        what is behind a token."""
        texts = [[*prompt, *ids[:-1]] for prompt, ids in zip(prompts, answers, strict=True)]
        longest = max(map(len, texts))
        with torch.no_grad():
            padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
            likeliest = self.twin(padded).logits.argmax(-1).tolist()
        for prompt, text, ids, found in zip(prompts, texts, answers, likeliest, strict=True):
            assert ids == found[len(prompt) - 1 : len(text)]


@pytest.fixture(scope="module", params=MODELS, ids=lambda suite: suite.__name__[4:])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    backend_spec("cpu")
    config = request.param.config | {"vocab_size": VOCAB_SIZE}
    twin = type("Twin", (request.param,), {"config": config})().transformers_model()
    folder = tmp_path_factory.mktemp("hybrid")
    twin.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL_FOLDER) / name, folder)
    return Saved(str(folder), twin)


@pytest.fixture(scope="module")
def expected(saved: Saved) -> list[list[int]]:
    """Answers of one request at a time, where nothing is ever found; the last is that of
    `second_turn`."""
    with saved.load(max_num_seqs=1, enable_prefix_caching=False) as llm:
        found = [answer(llm, prompt)[0] for prompt in PROMPTS]
        prompts = [*PROMPTS, second_turn(found)]
        found.append(answer(llm, prompts[-1], 40)[0])
    assert [len(ids) for ids in found] == [LENGTH, LENGTH, LENGTH, 40]
    saved.check(prompts, found)
    return found


def second_turn(answers: list[list[int]]) -> list[int]:
    return [*PROMPTS[1], *answers[1], 5, 6, 7]


def answer(llm: LLM, prompt: list[int], max_tokens: int = LENGTH) -> tuple[list[int], int]:
    """The ids of an answer, and how many tokens of the prompt came from the cache."""
    (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy(max_tokens))
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """The ids of all answers; the prompts run side by side."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy())
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_idle(llm: LLM) -> None:
    stats = llm._engine._core.stats()
    assert (stats.num_running, stats.num_used_slots) == (0, 0)


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_rows_that_lose_their_blocks_in_the_middle(
    saved: Saved, expected: list[list[int]], chunk: int
) -> None:
    with saved.load(num_kv_blocks=FEW_BLOCKS, max_num_batched_tokens=chunk) as llm:
        assert answers(llm, PROMPTS) == expected[:3]
        # one row has all of a step of one token
        assert llm._engine._core.stats().num_preemptions > 0 or chunk == 1
        assert answers(llm, PROMPTS[::-1]) == expected[2::-1]
        check_idle(llm)


@pytest.mark.parametrize("tokens", [3, 16])
def test_drafts_change_no_answer(saved: Saved, expected: list[list[int]], tokens: int) -> None:
    prompts = [*PROMPTS, second_turn(expected)]
    with saved.load(num_state_slots=60) as llm:
        llm.draft_with(PartlyWrong(prompts, expected), tokens)
        assert answers(llm, PROMPTS) == expected[:3]
        for prompt, ids in zip(prompts, expected, strict=True):
            assert answer(llm, prompt, len(ids))[0] == ids
        stats = llm._engine._core.stats()
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        check_idle(llm)


def test_a_recurrent_draft_model_is_refused(saved: Saved) -> None:
    with pytest.raises(ConfigError, match=r"keeps recurrent states.*choose ngram") as caught:
        saved.load(speculate="twin")
    assert caught.value.param == "speculate"


def test_every_snapshot_leads_to_the_same_ids(saved: Saved, expected: list[list[int]]) -> None:
    text = PROMPTS[1] + expected[1]
    ends = range(BLOCK, len(text) - 1, BLOCK)
    with saved.load() as llm:
        for end in ends:  # each prompt leaves one behind its last whole block
            assert answer(llm, text[: end + 1], 1)[0] == [text[end + 1]]
        for end in ends:
            rest = text[end + 1 :]
            assert answer(llm, text[: end + 1], len(rest)) == (rest, end)
        check_idle(llm)


def test_a_second_turn_finds_the_first_one(saved: Saved, expected: list[list[int]]) -> None:
    prompt = second_turn(expected)
    with saved.load() as llm:
        assert answer(llm, PROMPTS[1])[0] == expected[1]
        assert answer(llm, prompt, 40) == (expected[3], (len(prompt) - 4) // BLOCK * BLOCK)


async def test_an_aborted_row_disturbs_nobody(saved: Saved, expected: list[list[int]]) -> None:
    config = EngineConfig(model=saved.folder, **CONFIG)
    async with await AsyncLLM.start(config, in_process=True) as llm:
        gone = llm.generate({"prompt_token_ids": PROMPTS[1]}, greedy())
        await anext(gone)
        await gone.aclose()
        for prompt, ids in zip(PROMPTS, expected[:3], strict=True):
            found = llm.generate({"prompt_token_ids": prompt}, greedy())
            assert [one async for out in found for one in out.outputs[0].token_ids] == ids
