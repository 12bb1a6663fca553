"""An encoder-decoder of text behind the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..t5_models import END, LENGTH, greedy, make, save  # noqa: TID252 - no package to name
from .conftest import RunningServer, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save(make(), tmp_path_factory.mktemp("t5"))
    with running_server(
        "--model", f"t5={folder}", "--backend", "numpy", "--dtype", "float32"
    ) as running:
        yield running


def test_completions(server: RunningServer) -> None:
    body = {"model": "t5", "prompt": ["w5 w6 w7", "w8"], "max_tokens": 4, "temperature": 0}
    found = server.post("/v1/completions", {**body, "ignore_eos": True}).json()
    model = make()
    for ids, choice in zip(([5, 6, 7, END], [8, END]), found["choices"], strict=True):
        answer = greedy(model, ids, 4)
        assert choice["text"] == " ".join(f"w{one}" for one in answer if one > END)
    assert found["usage"]["prompt_tokens"] == 6
    echo = server.post("/v1/completions", {**body, "prompt": "w5 w6", "echo": True}).json()
    assert echo["choices"][0]["text"].startswith("w5 w6")


def test_what_is_refused(server: RunningServer) -> None:
    body = {"model": "t5", "prompt": "w5", "max_tokens": 2}
    for more, message in (
        ({"prompt": "w5 " * LENGTH}, f"the encoder reads {LENGTH}"),
        ({"max_tokens": LENGTH + 1, "prompt_logprobs": 1}, "are those of a decoder"),
        ({"echo": True, "logprobs": 1}, "are those of a decoder"),
        ({"use_beam_search": True, "n": 2}, "beam search"),
    ):
        answer = server.post("/v1/completions", {**body, **more})
        assert answer.status_code == 400, (more, answer.text)
        assert message in answer.text, answer.text
    talk = {"model": "t5", "messages": [{"role": "user", "content": "w5"}]}
    assert server.post("/v1/chat/completions", talk).status_code == 400
    assert server.post("/v1/completions", body).status_code == 200
