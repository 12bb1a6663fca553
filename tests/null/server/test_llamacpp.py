"""llama.cpp's own API, in the shapes that its server's tests ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any

import pytest
from vllmx_server.generating.fields import closed

from .conftest import MakeServer, Served, events_of

FLAGS = {"apis": ("llamacpp",)}


@pytest.fixture
async def llama(make_server: MakeServer) -> AsyncIterator[Served]:
    async with make_server(FLAGS) as served:
        yield served


async def post(served: Served, path: str, **body: Any) -> Any:
    response = await served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_stream_and_a_whole_completion_are_one_answer(llama: Served) -> None:
    body = {"prompt": "ab", "n_predict": 8, "temperature": 0.0, "cache_prompt": False}
    found = await post(llama, "/completion", **body, return_tokens=True)
    assert found == found | {"stop": True, "stop_type": "limit", "truncated": False, "index": 0}
    assert found["timings"]["prompt_n"] == found["tokens_evaluated"] == 2
    assert found["timings"]["predicted_n"] == len(found["tokens"]) == 8
    rate = 1000 * 7 / found["timings"]["predicted_ms"]  # the first token comes with the prompt
    assert found["timings"]["predicted_per_second"] == pytest.approx(rate)
    assert found["generation_settings"]["n_predict"] == 8
    assert found["prompt"] == "ab"
    response = await llama.client.post("/completions", json={**body, "stream": True})
    *pieces, last = events_of(response.text)
    assert "".join(each["content"] for each in pieces) == found["content"]
    counts = [each["tokens_predicted"] for each in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert [token for each in pieces for token in each["tokens"]] == found["tokens"]
    assert not any(each["stop"] for each in pieces)
    assert last == last | {"stop": True, "content": "", "tokens_predicted": 8}
    assert "[DONE]" not in response.text
    stopped = await post(llama, "/completion", **body, stop=[found["content"][2]])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", found["content"][2])
    await llama.becomes_idle()


async def test_prompts(llama: Served) -> None:
    short = {"n_predict": 3, "temperature": 0.0}
    text = await post(llama, "/completion", prompt="abc", **short)
    ids = await post(llama, "/completion", prompt=[*b"abc"], **short)
    mixed = await post(llama, "/completion", prompt=[97, "bc"], **short)
    assert text["content"] == ids["content"] == mixed["content"]
    several = await post(llama, "/completion", prompt=["abc", [*b"abc"], [97, "b", 99]], **short)
    assert [each["index"] for each in several] == [0, 1, 2]
    assert {each["content"] for each in several} == {text["content"]}
    one = await post(llama, "/completion", prompt=["abc"], **short)
    assert isinstance(one, list)
    body = {"prompt": ["abc", "abc"], "stream": True, **short}
    events = events_of((await llama.client.post("/completion", json=body)).text)
    for index in (0, 1):
        mine = [each for each in events if each["index"] == index]
        assert "".join(each["content"] for each in mine) == text["content"]
        assert mine[-1]["tokens_predicted"] == 3


async def test_probabilities_and_biases(llama: Served) -> None:
    body = {"prompt": "ab", "n_probs": 4, "n_predict": 3, "temperature": 0.0}
    found = await post(llama, "/completion", **body)
    rows = found["completion_probabilities"]
    assert len(rows) == 3
    for row in rows:
        assert len(row["top_logprobs"]) == 4
        assert row["id"] == row["top_logprobs"][0]["id"], "greedy"
        assert row["logprob"] <= 0
    response = await llama.client.post("/completion", json={**body, "stream": True})
    *pieces, _ = events_of(response.text)
    assert [row for each in pieces for row in each["completion_probabilities"]] == rows
    biases = [[5, False], [6, 1.5]]
    biased = await post(llama, "/completion", prompt="a", n_predict=1, logit_bias=biases, n_keep=0)
    found = biased["generation_settings"]["logit_bias"]
    assert found == [{"token": 5, "bias": -100.0}, {"token": 6, "bias": 1.5}]
    digits = await post(
        llama, "/completion", prompt="ab", n_predict=4, grammar='root ::= "7" "8"', seed=-1
    )
    assert digits["content"] == "78"


async def test_texts_and_tokens(llama: Served) -> None:
    assert await post(llama, "/tokenize", content="aé") == {"tokens": [*"aé".encode()]}
    pieces = await post(llama, "/tokenize", content="aé", with_pieces=True)
    assert pieces["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
    ]
    assert await post(llama, "/detokenize", tokens=[97, 98]) == {"content": "ab"}
    turns = [{"role": "user", "content": "hi"}]
    prompt = (await post(llama, "/apply-template", messages=turns))["prompt"]
    assert prompt == llama.llm.render_chat(turns)


async def test_properties_and_slots(llama: Served) -> None:
    props = (await llama.client.get("/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    slots = (await llama.client.get("/slots")).json()
    assert len(slots) == props["total_slots"]
    assert not any(each["is_processing"] for each in slots)


@pytest.mark.parametrize(
    ("action", "status", "words"),
    [
        ("save", 501, "--kv-disk"),
        ("restore", 501, "--kv-disk"),
        ("erase", 501, "/v1/sessions/"),
        ("empty", 400, "save, restore, erase, got 'empty'"),
    ],
)
async def test_actions_on_slots_are_explained(
    llama: Served, action: str, status: int, words: str
) -> None:
    refused = await llama.client.post(f"/slots/0?action={action}", json={"filename": "f"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (status, status)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/completion", {"mirostat": 1}, "mirostat = 1"),
        ("/completion", {"xtc_probability": 0.5}, "xtc_probability"),
        ("/completion", {"dry_multiplier": 0.8}, "repeat_penalty"),
        ("/completion", {"n_cmpl": 0}, "n_cmpl"),
        ("/completion", {"samplers": ["top_k", "magic"]}, "samplers names 'magic'"),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "multimodal"),
        ("/completion", {"logit_bias": {"5": "x"}}, "logit_bias"),
        ("/completion", {"logit_bias": {"5": True}}, "logit_bias"),
        ("/completion", {"logit_bias": "5"}, "logit_bias"),
        ("/completion", {"logit_bias": [[-1, 1.0]]}, "logit_bias"),
        ("/completion", {"logit_bias": [[True, 1.0]]}, "logit_bias"),
        ("/completion", {"logit_bias": [["a", True]]}, "logit_bias"),
        ("/completion", {"logit_bias": [["a" * 257, 1]]}, "logit_bias"),
        ("/completion", {"logit_bias": [["a", 1]] * 1025}, "logit_bias"),
        ("/completion", {"logit_bias": {str(10**11): 1}}, "logit_bias"),
        ("/completion", {"logit_bias": [["5", float("1e300")]]}, "logit_bias"),
        ("/completion", {"response_fields": ["a"] * 65}, "response_fields"),
        ("/completion", {"response_fields": ["/" * 257]}, "response_fields"),
        ("/completion", {"samplers": ["top_k"] * 65}, "samplers"),
        ("/completion", {"use_beam_search": True}, "use_beam_search = True is not served"),
        ("/completion", {"n_probs": 1000}, "n_probs must be between 0 and 20"),
        ("/completion", {"n_probs": 1000}, "raise --max-logprobs"),
        ("/completion", {"nonsense": 1}, "nonsense"),
        ("/completion", {"prompt": []}, "prompt has 0 entries"),
        ("/completion", {"prompt": [1, [2]]}, "prompt mixes"),
        ("/completion", {"prompt": [10**6]}, "1000000"),
        ("/completion", {"logit_bias": [["a"]]}, "logit_bias"),
        ("/completion", {"grammar": "root ::= nothing"}, "nothing"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix is not served"),
        ("/infill", {"input_suffix": "b"}, "input_prefix"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        ("/detokenize", {"tokens": [10**6]}, "1000000"),
    ],
)
async def test_what_cannot_be_served_is_named(
    llama: Served, path: str, body: dict[str, Any], words: str
) -> None:
    asked = {"prompt": "ab", **body} if path == "/completion" else body
    refused = await llama.client.post(path, json=asked)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]


async def test_a_prompt_that_is_too_long(llama: Served) -> None:
    refused = await llama.client.post("/completion", json={"prompt": "a" * 600})
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert 512 < error["n_prompt_tokens"] <= 600
    assert error["n_ctx"] == 512
    assert "exceeds the available context size" in error["message"]


async def test_paths_without_a_version(llama: Served) -> None:
    turns = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.0, "max_tokens": 4}
    body = {**turns, "id_slot": 0, "timings_per_token": True, "return_progress": False}
    found = await post(llama, "/chat/completions", **body, model="any-name")
    same = await post(llama, "/v1/chat/completions", **turns)
    assert found["choices"] == same["choices"]
    assert found["model"] == same["model"] == "fake"
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        assert (await post(llama, path, **turns))["input_tokens"] == same["usage"]["prompt_tokens"]
    listed = (await llama.client.get("/models")).json()["data"]
    assert [each["id"] for each in listed] == ["fake"]
    answer = await post(llama, "/responses", input="hi", max_output_tokens=4, temperature=0.0)
    assert answer["object"] == "response"
    refused = await llama.client.post("/chat/completions", json={"messages": []})
    assert refused.json()["error"]["code"] == 400
    refused = await llama.client.post("/reranking", json={"query": "a", "documents": ["b"]})
    assert refused.status_code == 400


async def test_several_answers_and_chosen_fields(llama: Served) -> None:
    body = {"prompt": ["ab", {"prompt_string": "cd"}], "n_predict": 4, "seed": 3}
    found = await post(llama, "/completion", **body, n_cmpl=2)
    assert [each["index"] for each in found] == [0, 1, 2, 3]
    assert [each["prompt"] for each in found] == ["ab", "ab", "cd", "cd"]
    assert found[0]["content"] != found[1]["content"]
    response = await llama.client.post("/completion", json={**body, "n": 2, "stream": True})
    events = events_of(response.text)
    for index, each in enumerate(found):
        mine = [event for event in events if event["index"] == index]
        assert "".join(event["content"] for event in mine) == each["content"]
        assert mine[-1]["tokens_predicted"] == 4
    fields = ["content", "timings/predicted_n", "generation_settings/n_predict", "timings/x/y"]
    chosen = await post(llama, "/completion", prompt="ab", n_predict=4, seed=3,
                        response_fields=fields)  # fmt: skip
    assert chosen == {
        "content": found[0]["content"],
        "timings/predicted_n": 4,
        "generation_settings/n_predict": 4,
    }


async def test_biases_of_texts(llama: Served) -> None:
    asked = {"prompt": "ab", "n_predict": 1, "temperature": 0.0}
    for bias in ([["xy", 100], ["y", False]], {"120": 100, "y": -100}):
        found = await post(llama, "/completion", **asked, logit_bias=bias)
        assert found["content"] == "x"
    digit = await post(llama, "/completion", **asked, logit_bias=[["7", 100], [7, -100]])
    assert digit["content"] == "7"
    settings = found["generation_settings"]
    assert settings["logit_bias"] == [{"token": 120, "bias": 100}, {"token": 121, "bias": -100}]


X = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}
Y: dict[str, Any] = {"properties": {"y": {"const": 2}}, "required": ["y"]}
REF = {"$ref": "#/$defs/X"}


@pytest.mark.parametrize(
    ("parts", "is_closed"),
    [
        (X, True),
        ({"allOf": [REF]}, True),
        ({"properties": {"p": {"anyOf": [REF, {"type": "null"}]}}, "required": ["p"]}, True),
        ({"allOf": [REF, Y]}, False),
        ({"allOf": [{"allOf": [REF]}, Y]}, False),
        ({**Y, "allOf": [REF]}, False),
        ({**Y, **REF}, False),
        ({**Y, "anyOf": [REF]}, False),
        ({**Y, "oneOf": [REF]}, False),
    ],
)
async def test_objects_are_closed_where_one_schema_describes_them(
    llama: Served, parts: dict[str, Any], is_closed: bool
) -> None:
    schema = {"type": "object", **parts, "$defs": {"X": X}}
    await post(llama, "/completion", prompt="ab", n_predict=4, json_schema=schema)
    found = closed(deepcopy(schema))
    assert ("additionalProperties" in found["$defs"]["X"]) is is_closed
    assert ("additionalProperties" in found) is (is_closed and "properties" in parts)


async def test_samplers_that_are_left_out_are_off(llama: Served) -> None:
    given = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.5}
    found = await post(llama, "/completion", prompt="ab", n_predict=1, **given,
                       samplers=["top_k", "infill"])  # fmt: skip
    off = {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    assert {name: found["generation_settings"][name] for name in given} == off


async def test_an_answer_that_fills_the_context_is_truncated(llama: Served) -> None:
    body = {"prompt": "ab", "ignore_eos": True, "seed": 1}
    assert (await post(llama, "/completion", **body, n_predict=-1))["truncated"] is True
    assert (await post(llama, "/completion", **body, n_predict=9))["truncated"] is False


async def test_the_middle_of_a_text(llama: Served) -> None:
    """Three letters serve as the marks of the model."""
    marks = {"prefix_token": "P", "suffix_token": "S", "middle_token": "M"}
    llama.llm.tokenizer.config |= marks
    body = {"input_prefix": "a", "prompt": "b", "input_suffix": "c", "n_predict": 2, "seed": 1}
    found = await post(llama, "/infill", **body)
    assert found["prompt"] == "PabScM"
    same = await post(llama, "/completion", prompt="PabScM", n_predict=2, seed=1)
    assert found["content"] == same["content"]
    extra = [{"filename": "f", "text": "x"}]
    editor = {"id_slot": 0, "samplers": ["top_k", "top_p", "infill"], "n_indent": 4,
              "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "cache_prompt": True}  # fmt: skip
    found = await post(llama, "/infill", **body, **editor, input_extra=extra)
    assert found["prompt"] == "\n\n--- snippet ---\n\nxPabScM"


async def test_other_apis_keep_theirs(make_server: MakeServer) -> None:
    async with make_server({**FLAGS, "api_key": ("k",)}) as served:
        refused = await served.client.get("/slots")
        assert refused.json()["error"]["code"] == 401
        openai = await served.client.post("/v1/completions", json={"prompt": "a"})
        assert openai.json()["error"]["code"] == "invalid_api_key"
