"""The choices of one call share whatever is the same for all of them."""

from __future__ import annotations

import pytest
from vllmx_core.bounds import MAX_CHOICES
from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import MAX_ALLOWED_IDS, SamplingParams
from vllmx_engine.client.request import Request, RequestBuilder
from vllmx_engine.core import engine_core as core_module
from vllmx_engine.core.limits import Limits
from vllmx_engine.core_start import ThreadFrontend
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.ipc import AddRequest, FrameReader, ToCore, encode_frame, to_core_decoder
from vllmx_engine.wire.messages import CoreInfo, CoreRequest, Follower, choices_of, pack_ids
from vllmx_testing.fake import FakeRules

from tests.null.engine.harness import Harness

WORDS = tuple(f"word{i}" for i in range(200))


@pytest.fixture
def request_(tokenizer: Tokenizer, info: CoreInfo) -> Request:
    params = SamplingParams(
        n=MAX_CHOICES,
        bad_words=WORDS,
        logit_bias={5: 1.0},
        allowed_token_ids=range(259),  # type: ignore[arg-type]
        prompt_logprobs=1,
        max_tokens=4,
        seed=1,
    )
    return RequestBuilder(tokenizer, info).build("ab" * 20, params)


def test_parameters_are_checked_a_few_times_for_all_choices(
    tokenizer: Tokenizer, info: CoreInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[int] = []
    monkeypatch.setattr(SamplingParams, "_check_lists", lambda self: checks.append(self.n))
    RequestBuilder(tokenizer, info).build("ab", SamplingParams(n=MAX_CHOICES, prompt_logprobs=1))
    assert len(checks) <= 3


def test_choices_hold_the_same_objects(request_: Request) -> None:
    leader, second, *rest = request_.core
    assert len({core.seed for core in request_.core}) == MAX_CHOICES
    assert second.params.prompt_logprobs is None
    for core in rest:
        assert core.shares_all_with(leader)
        assert core.params is second.params


def test_a_call_is_one_message_of_the_size_of_one_choice(request_: Request) -> None:
    sent: list[ToCore] = []
    frontend = ThreadFrontend.__new__(ThreadFrontend)
    frontend.status = "ready"
    frontend._send = sent.append  # type: ignore[method-assign]
    frontend.add(request_.core)
    (message,) = sent
    assert isinstance(message, AddRequest)
    alone = len(encode_frame(AddRequest(request_.core[0])))
    frame = encode_frame(message)
    assert len(frame) < alone + 32 * MAX_CHOICES
    (received,) = FrameReader(to_core_decoder).feed(frame)
    assert isinstance(received, AddRequest)
    assert choices_of(received.request, received.followers) == request_.core


def test_the_core_checks_and_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []
    check = core_module.check_request

    def counted(request: CoreRequest, limits: Limits) -> None:
        checks.append(request.request_id)
        check(request, limits)

    monkeypatch.setattr(core_module, "check_request", counted)
    harness = Harness(rules=FakeRules(vocab_size=48))
    params = SamplingParams(presence_penalty=1.0, allowed_token_ids=(1, 2, 3), logit_bias={2: 9.0})
    leader = CoreRequest(
        request_id="0",
        prompt=pack_ids([1, 2]),
        params=params,
        bad_words_ids=[[4, 5]],
        max_tokens=2,
        seed=0,
    )
    followers = [Follower(str(i), i) for i in range(1, 5)]
    for request in choices_of(leader, followers):
        harness.core.add(request)
    assert checks == ["0"]
    first, *others = harness.core._scheduler.live.values()
    assert first.rules is not None
    for other in others:
        assert other.rules is not None
        assert other.rules.mask is first.rules.mask
        assert other.rules.phrases is first.rules.phrases
        assert other.rules.counts is not first.rules.counts


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids", "bad_words", "stop"])
def test_lists_are_counted_before_they_are_walked(name: str) -> None:
    class Long(list[int]):
        def __len__(self) -> int:
            return MAX_ALLOWED_IDS + 1

        def __iter__(self) -> None:  # type: ignore[override]
            raise AssertionError("walked")

    with pytest.raises(InvalidRequestError, match=f"{name} has {MAX_ALLOWED_IDS + 1} entries"):
        SamplingParams(**{name: Long()})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [True, -1, 1.5, "1", None])
def test_what_is_no_token_id_is_named(wrong: object) -> None:
    for name in ("allowed_token_ids", "stop_token_ids"):
        with pytest.raises(InvalidRequestError, match="must be") as caught:
            SamplingParams(**{name: (5, wrong)})  # type: ignore[arg-type]
        assert caught.value.param == name
        assert repr(wrong) in caught.value.message
