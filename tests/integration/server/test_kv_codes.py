"""A server whose keys have 8 bits and whose values have 4."""

from __future__ import annotations

from vllmx import LLM, SamplingParams

from tests.usable_backends import backend_spec

from .conftest import running_server

MESSAGES = [
    {
        "role": "system",
        "content": "You are a helpful assistant. Answer in one short sentence. " * 2,
    },
    {"role": "user", "content": "What is the capital of France?"},
]
BODY = {"messages": MESSAGES, "max_tokens": 48, "temperature": 0, "logprobs": True}


def test_it_answers_as_an_engine_with_this_cache() -> None:
    backend_spec("cpu")
    with running_server(
        "--backend", "cpu", "-ctk", "q8_0", "-ctv", "q4_0", "--max-num-seqs", "8"
    ) as server:
        assert 'cache_dtype="q8,q4"' in server.get("/metrics").text
        answers = [server.post("/v1/chat/completions", BODY).json() for _ in range(2)]
        again, plain = [answer["usage"]["prompt_tokens_details"] for answer in reversed(answers)]
        assert again["cached_tokens"] > plain["cached_tokens"] == 0
    choices = [answer["choices"][0] for answer in answers]
    assert choices[0] == choices[1]  # also over the cached codes, to the last bit
    assert "Paris" in choices[0]["message"]["content"]
    with LLM("demo", backend="cpu", kv_cache_dtype="q8,q4", max_num_seqs=8) as llm:
        (own,) = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=48))
    assert own.outputs[0].text.strip() == choices[0]["message"]["content"].strip()
