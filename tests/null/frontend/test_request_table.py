"""What becomes of core outputs, fed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from vllmx_core.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    VllmxError,
)
from vllmx_core.sampling import SamplingParams
from vllmx_engine.client.request import Request, RequestBuilder, RequestOptions
from vllmx_engine.client.request_table import RequestTable
from vllmx_engine.text.output import SequenceText
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import CoreInfo, CoreOutput, TokenLogprobs
from vllmx_engine.wire.outputs import Logprob


class Bench:
    """A request table with its builder, and ids written as text."""

    def __init__(self, tokenizer: Tokenizer, info: CoreInfo) -> None:
        self.builder = RequestBuilder(tokenizer, info)
        self.table = RequestTable(tokenizer)

    def build(self, **params: object) -> Request:
        return self.builder.build("hi", SamplingParams(**params))  # type: ignore[arg-type]


@pytest.fixture
def bench(tokenizer: Tokenizer, info: CoreInfo) -> Bench:
    return Bench(tokenizer, info)


def update(request: Request, text: str, index: int = 0, **fields: object) -> CoreOutput:
    core_id = request.core[index].request_id
    return CoreOutput(request_id=core_id, ids=list(text.encode()), **fields)  # type: ignore[arg-type]


def logprob_rows(ids: Sequence[int], logprob: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, logprob, 2, [65, token], [-0.1, logprob]) for token in ids]


def test_deltas_merge_until_they_are_taken(bench: Bench) -> None:
    request = bench.build()
    state = bench.table.add(request, "delta")
    bench.table.take([update(request, "ab")])
    bench.table.take([update(request, "c")])
    first = state.output().outputs[0]
    assert (first.text, first.token_ids, first.finish_reason) == ("abc", [97, 98, 99], None)
    assert not state.has_update()
    bench.table.take([update(request, "d", finish_reason="length")])
    last = state.output()
    assert last.finished
    assert (last.outputs[0].text, last.outputs[0].finish_reason) == ("d", "length")
    assert len(bench.table) == 0


def test_cumulative_outputs_hold_everything(bench: Bench) -> None:
    request = bench.build()
    state = bench.table.add(request, "cumulative")
    texts = []
    for piece in "abc":
        bench.table.take([update(request, piece)])
        texts.append(state.output().outputs[0].text)
    assert texts == ["a", "ab", "abc"]


def test_a_stop_string_over_several_tokens_is_never_shown(bench: Bench) -> None:
    request = bench.build(stop=("END",), logprobs=0)
    state = bench.table.add(request, "delta")
    shown = ""
    aborted: list[str] = []
    for piece in ("x", "E", "N", "y", "EN", "Dzz"):
        ids = list(piece.encode())
        output = update(request, piece, logprobs=logprob_rows(ids, -1.0))
        aborted = bench.table.take([output])
        choice = state.output().outputs[0]
        shown += choice.text
    assert shown == "xENy"
    assert aborted == [request.core[0].request_id]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "END")
    assert choice.token_ids == [68]  # what follows the stop string is not taken
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 1
    assert bench.table.take([update(request, "late")]) == []


def test_a_stop_string_in_the_core_s_last_output_aborts_nothing(bench: Bench) -> None:
    request = bench.build(stop=("b",))
    state = bench.table.add(request)
    assert bench.table.take([update(request, "ab", finish_reason="length")]) == []
    choice = state.output().outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("a", "stop", "b")


@pytest.mark.parametrize(
    ("params", "text", "stop_reason"),
    [
        ({}, "a", None),
        ({"stop_token_ids": (98,)}, "a", 98),
        ({"stop_token_ids": (98,), "include_stop_str_in_output": True}, "ab", 98),
    ],
)
def test_stop_ids(
    bench: Bench, params: dict[str, object], text: str, stop_reason: int | None
) -> None:
    request = bench.build(**params)
    state = bench.table.add(request)
    bench.table.take([update(request, "ab", finish_reason="stop", stop_id=98)])
    choice = state.output().outputs[0]
    assert (choice.text, choice.token_ids) == (text, [97, 98])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop_reason)


def test_characters_over_several_tokens(bench: Bench) -> None:
    request = bench.build()
    state = bench.table.add(request, "delta")
    pieces = []
    for byte in "é€😀".encode():
        output = CoreOutput(request_id=request.core[0].request_id, ids=[byte])
        bench.table.take([output])
        pieces.append(state.output().outputs[0].text)
    assert "".join(pieces) == "é€😀"
    assert pieces.count("") == 6
    bench.table.take([CoreOutput(request_id=request.core[0].request_id, ids=[0xE2])])
    bench.table.end(state, "abort")
    assert state.output().outputs[0].text == "\ufffd"


def test_logprobs(bench: Bench) -> None:
    request = bench.build(logprobs=2, prompt_logprobs=1)
    state = bench.table.add(request, "delta")
    rows = logprob_rows([97, 65], -0.5)
    prompt_rows = logprob_rows([105], -3.0)
    bench.table.take([update(request, "aA", logprobs=rows, prompt_logprobs=prompt_rows)])
    output = state.output()
    choice = output.outputs[0]
    assert choice.logprobs == [
        {97: Logprob(-0.5, 2, "a"), 65: Logprob(-0.1, 1, "A")},
        {65: Logprob(-0.5, 2, "A")},
    ]
    assert choice.cumulative_logprob == pytest.approx(-1.0)
    assert choice.text_offsets == [0, 1]
    assert output.prompt_logprobs == [
        None,
        {105: Logprob(-3.0, 2, "i"), 65: Logprob(-0.1, 1, "A")},
    ]
    bench.table.take([update(request, "b", logprobs=logprob_rows([98], -0.5))])
    second = state.output()
    assert second.prompt_logprobs is None
    assert second.outputs[0].text_offsets == [2]
    assert second.outputs[0].cumulative_logprob == pytest.approx(-1.5)


def test_best_of_returns_the_likeliest(bench: Bench) -> None:
    request = bench.build(n=2, best_of=4)
    notified: list[bool] = []
    state = bench.table.add(request, "delta", lambda: notified.append(state.finished))
    for index, (text, logprob) in enumerate([("a", -3.0), ("bb", -1.0), ("c", -4.0), ("d", -0.5)]):
        rows = logprob_rows(list(text.encode()), logprob)
        bench.table.take([update(request, text, index, logprobs=rows, finish_reason="length")])
    assert notified == [True]
    outputs = state.output().outputs
    assert [(choice.index, choice.text) for choice in outputs] == [(0, "d"), (1, "bb")]
    assert [choice.logprobs for choice in outputs] == [None, None]  # nobody asked for them


def test_choices_end_on_their_own(bench: Bench) -> None:
    request = bench.build(n=2)
    state = bench.table.add(request, "delta")
    bench.table.take([update(request, "a", 1, finish_reason="length")])
    output = state.output()
    assert [choice.index for choice in output.outputs] == [1]
    assert not output.finished
    bench.table.take([update(request, "b", 0, finish_reason="length")])
    assert state.output().finished


def test_an_error_ends_all_choices_with_its_type(bench: Bench) -> None:
    request = bench.build(n=2)
    other = bench.build()
    state, other_state = bench.table.add(request), bench.table.add(other)
    failure = update(
        request,
        "",
        1,
        finish_reason="error",
        error="too long",
        error_code="context_length_exceeded",
    )
    assert set(bench.table.take([failure])) == {core.request_id for core in request.core}
    assert isinstance(state.error, ContextLengthError)
    assert state.error.message == state.output().error == "too long"
    assert not other_state.finished


def test_an_unknown_error_code_becomes_the_base_error(bench: Bench) -> None:
    request = bench.build()
    state = bench.table.add(request)
    bench.table.take([update(request, "", finish_reason="error", error_code="of the future")])
    assert type(state.error) is VllmxError


@pytest.mark.parametrize("where", ["push", "finish"])
def test_a_fault_in_one_text_spares_the_others(
    bench: Bench, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [bench.build() for _ in range(3)]
    states = [bench.table.add(request, "delta") for request in requests]
    broken = states[1].choices[0].text

    class Boom:
        num_tokens = 0

        def __getattr__(self, name: str) -> object:
            if name == where:
                raise RuntimeError("boom")
            return getattr(broken, name)

    monkeypatch.setattr(states[1].choices[0], "text", Boom())
    last = [update(request, "ab", finish_reason="length") for request in requests]
    assert bench.table.take(last) == [requests[1].core[0].request_id]
    assert [state.finished for state in states] == [True, True, True]
    assert [state.output().outputs[0].text for state in (states[0], states[2])] == ["ab", "ab"]
    assert states[1].error is not None
    assert "boom" not in states[1].error.message
    assert states[1].output().outputs[0].finish_reason == "error"
    assert len(bench.table) == 0


def test_a_fault_at_the_end_of_a_text_does_not_keep_others_from_ending(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [bench.table.add(bench.build()) for _ in range(3)]

    def boom(text: object, reason: str) -> str:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(SequenceText, "finish", boom)
        bench.table.end(states[0], "abort")
    assert len(bench.table.end_all("abort")) == 2
    assert [state.finished for state in states] == [True, True, True]


def test_end_all(bench: Bench) -> None:
    requests = [bench.build(n=2), bench.build()]
    states = [bench.table.add(request) for request in requests]
    error = EngineDeadError("gone")
    assert len(bench.table.end_all("error", error)) == 3
    assert [state.error for state in states] == [error, error]
    assert len(bench.table) == 0
    assert bench.table.end_all("error", error) == []


def test_metrics(bench: Bench) -> None:
    request = bench.build(n=2)
    state = bench.table.add(request)
    bench.table.take([update(request, "ab", 0, num_cached_tokens=1), update(request, "c", 1)])
    bench.table.end(state, "abort")
    output = state.output()
    assert output.num_cached_tokens == 1
    assert output.metrics is not None
    assert output.metrics.num_generation_tokens == 3
    assert output.metrics.first_token_s is not None
    assert output.metrics.arrival_s <= output.metrics.first_token_s


def test_places_are_shared_between_clients(bench: Bench) -> None:
    """Each may have as many as are left free for others, or as run together."""
    states = []

    def taken(client: str) -> int:
        """How many are taken of a client."""
        for count in range(13):
            try:
                bench.table.check_room(1, 2, 10, client=client)
            except QueueFullError:
                return count
            options = RequestOptions(client=client)
            states.append(bench.table.add(bench.builder.build("hi", options=options)))
        raise AssertionError

    assert [taken(name) for name in ("a", "b", "c", "d")] == [6, 3, 2, 1]
    for state in states[:6]:
        bench.table.end(state, "abort")
    assert taken("a") == 3
    with pytest.raises(InvalidRequestError, match="at most 2 run and 4 wait"):
        bench.table.check_room(7, 2, 10, client="e")
    with pytest.raises(QueueFullError):
        bench.table.check_room(12, 2, 10)  # of nobody
