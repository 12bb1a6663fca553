"""Beam search over HTTP gives the beams of `LLM.beam_search`."""

from __future__ import annotations

from vllmx import LLM
from vllmx_engine.client.beams import BeamSearchParams

from .conftest import RunningServer

PROMPT = "Once upon a time there was a"


def test_beams_over_http(server: RunningServer) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 12, "n": 3, "use_beam_search": True}
    with LLM("demo", max_model_len=256) as llm:
        expected = llm.beam_search(PROMPT, BeamSearchParams(3, max_tokens=12))[0].sequences
    found = server.post("/v1/completions", asked)
    assert found.status_code == 200, found.text
    texts = [choice["text"] for choice in found.json()["choices"]]
    assert len(texts) == 3
    assert texts[0] == expected[0].text.removeprefix(PROMPT)
    assert found.json()["usage"]["completion_tokens"] == 36
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    found = server.post("/v1/chat/completions", {**chat, "n": 2, "use_beam_search": True})
    assert len(found.json()["choices"]) == 2, found.text
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    forced = {**chat, "n": 2, "use_beam_search": True, "tools": [tool], "tool_choice": "required"}
    refused = server.post("/v1/chat/completions", forced)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "use_beam_search")
    for wrong in ({"stream": True}, {"stop": ["x"]}, {"n": 64}, {"logprobs": 2}):
        refused = server.post("/v1/completions", {**asked, **wrong})
        assert refused.status_code == 400, refused.text
    refused = server.post("/v1/completions", {"prompt": "x", "length_penalty": 2.0})
    assert "use_beam_search" in refused.text
