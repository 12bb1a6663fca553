"""Several models behind one server, each with a core of its own."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllmx_server.limits.key_records import digest_of
from vllmx_testing.fake_checkpoint import make_fake_checkpoint

from tests.waiting import PATIENCE_S, wait_until

from .conftest import MakeFake, RunningServer, running_server

ADMIN = {"authorization": "Bearer operator"}


def flags(folder: Path) -> tuple[str, ...]:
    """A model from the start, one on demand, and one that cannot be loaded."""
    make_fake_checkpoint(folder / "one", vocab_size=128, eos_id=None)
    make_fake_checkpoint(folder / "two", vocab_size=128, eos_id=None, max_model_len=256)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    return (
        "--backend=fake",
        f"--model=one={folder / 'one'},alias=uno",
        f"--model=two={folder / 'two'},load=on-demand,alias=due",
        f"--model=broken={folder / 'broken'},load=on-demand",
        "--admin-key=operator",
        "--sse-ping-interval-s=0.05",
        "--apis=ollama",
    )


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, fake_environment: dict[str, str]
) -> Iterator[RunningServer]:
    with running_server(
        *flags(tmp_path_factory.mktemp("models")), environment=fake_environment
    ) as server:
        yield server


def of_model(server: RunningServer, model: str, metric: str) -> float:
    """The sum of a metric's samples of one model."""
    lines = server.get("/metrics").text.splitlines()
    label = f'model_name="{model}"'
    found = [line for line in lines if line.startswith(f"vllmx:{metric}{{") and label in line]
    return sum(float(line.split()[-1]) for line in found)


def ask(server: RunningServer, model: str | None, **fields: Any) -> Any:
    body = {"prompt": "ab", "max_tokens": 3, **fields} | ({"model": model} if model else {})
    return server.post("/v1/completions", body)


def states(server: RunningServer) -> dict[str, str]:
    cards = server.get("/v1/models").json()["data"]
    return {card["id"]: card.get("state", "loaded") for card in cards}


def is_shown_loaded(server: RunningServer, model: str) -> bool:
    """Whether a model is, a moment after it answered; on a busy machine it may have gone again."""
    assert ask(server, model).status_code == 200
    return states(server)[model] == "loaded"


def test_requests_go_to_the_model_that_they_name(models: RunningServer) -> None:
    loaded, others = dict.fromkeys(("one", "uno"), "loaded"), ("two", "due", "broken")
    assert states(models) == loaded | dict.fromkeys(others, "unloaded")
    for name, wanted in ((None, "one"), ("one", "one"), ("uno", "one"), ("due", "two")):
        answer = ask(models, name)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == wanted
    missing = ask(models, "three")
    assert missing.status_code == 404
    assert "served: 'one', 'uno', 'two', 'due'" in missing.json()["error"]["message"]
    assert states(models)["two"] == "loaded"
    card = models.get("/v1/models/due").json()
    assert (card["id"], card["max_model_len"], card["aliases"]) == ("due", 256, ["two"])
    assert card["root"] == models.get("/v1/models/two").json()["root"]
    assert card["size_bytes"] > 0
    text = models.get("/metrics").text
    for name in ("one", "two"):
        assert (
            f'vllmx:request_success_total{{finished_reason="length",model_name="{name}"}}' in text
        )
    assert text.count("# TYPE vllmx:request_success_total") == 1


def test_a_stream_waits_with_pings_for_a_model_that_loads(models: RunningServer) -> None:
    body = {"model": "two"}
    wait_until(  # a moment after its last request
        lambda: models.post("/v1/models/unload", body, headers=ADMIN).status_code == 200
    )
    assert states(models)["two"] == "unloaded"
    text = ask(models, "two", stream=True).text
    assert text.startswith(": ping\n\n")
    assert text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    assert {event["model"] for event in events} == {"two"}
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stream_of_lines_has_no_pings_while_its_model_loads(models: RunningServer) -> None:
    """Ollama's clients read every line as JSON, and may add a tag to a name."""
    wait_until(  # a moment after its last request
        lambda: models.post("/v1/models/unload", {"model": "two"}, headers=ADMIN).status_code == 200
    )
    tags = {each["name"] for each in models.get("/api/tags").json()["models"]}
    assert tags == {"one", "uno", "two", "due", "broken"}
    assert {each["name"] for each in models.get("/api/ps").json()["models"]} == {"one", "uno"}
    body = {"model": "due:latest", "prompt": "ab", "raw": True, "options": {"num_predict": 3}}
    answer = models.post("/api/generate", {**body, "stream": True})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["eval_count"] == 3
    assert models.post("/api/show", {"model": "broken"}).json().keys() == {"error"}


def test_who_would_wait_too_long_for_a_model_is_sent_away(
    tmp_path: Path, fake_environment: dict[str, str]
) -> None:
    with running_server(
        *flags(tmp_path), "--model-wait-s=0.01", environment=fake_environment
    ) as server:
        late = ask(server, "two")  # a process takes longer than that to start
        assert late.status_code == 503, late.text
        assert late.headers["retry-after"]
        assert "longer than 0.01 s" in late.json()["error"]["message"]
        assert ask(server, "one").status_code == 200
        wait_until(lambda: ask(server, "two").status_code == 200)  # it went on loading


def test_a_model_that_cannot_be_loaded_harms_nobody(models: RunningServer) -> None:
    failed = ask(models, "broken")
    assert failed.status_code >= 400
    assert failed.json()["error"]["message"]
    assert "Traceback" not in failed.text
    stream = ask(models, "broken", stream=True)
    assert stream.status_code == 200
    assert '"error"' in stream.text
    assert stream.text.endswith("data: [DONE]\n\n")
    assert states(models)["broken"] == "failed"
    assert ask(models, "one").status_code == 200


def test_operators_alone_load_and_unload(models: RunningServer) -> None:
    body = {"model": "two"}
    assert models.post("/v1/models/load", body).status_code == 401
    assert models.post("/v1/models/load", body, headers=ADMIN).status_code == 200
    assert states(models)["two"] == "loaded"
    first = models.post("/v1/models/unload", {"model": "one"}, headers=ADMIN)
    assert first.status_code == 400
    assert "it stays" in first.json()["error"]["message"]
    reset = models.post("/reset_prefix_cache", headers=ADMIN).json()["reset"]
    assert reset["one"] is True


def test_a_model_that_sleeps_has_no_core_until_it_is_woken(models: RunningServer) -> None:
    body = {"model": "two"}
    wait_until(lambda: models.post("/v1/models/unload", body, headers=ADMIN).status_code == 200)
    core = models.core_pid()
    assert models.post("/sleep", headers=ADMIN).json() == {"model": "one", "state": "unloaded"}
    assert not Path(f"/proc/{core}").exists()
    assert models.get("/health").status_code == 503
    assert sleeps(models)
    assert models.post("/wake", headers=ADMIN).json() == {"model": "one", "state": "loaded"}
    assert ask(models, "one").status_code == 200
    assert models.core_pid() != core


def test_a_model_sleeps_when_its_requests_have_ended(
    fake_model: Path, fake_environment: dict[str, str]
) -> None:
    flags = ("--backend=fake", f"--model={fake_model}", "--admin-key=operator")
    with running_server(*flags, environment=fake_environment) as server:
        for query, name in (("level=3", "level"), ("mode=keep", "mode")):
            refused = server.post(f"/sleep?{query}", headers=ADMIN)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        body = {"prompt": "hi", "max_tokens": 400, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            refused = server.post("/sleep?level=2", headers=ADMIN)
            assert refused.status_code == 400
            assert "mode=abort" in refused.json()["error"]["message"]
            slept = server.post("/sleep?level=1&mode=abort", headers=ADMIN)
            assert slept.json()["state"] == "unloaded"
            assert any('"abort"' in line for line in lines)
        assert server.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
        assert server.post("/wake_up?tags=gpu", headers=ADMIN).status_code == 400
        woken = server.post("/wake_up?tags=weights&tags=kv_cache", headers=ADMIN)
        assert woken.json()["state"] == "loaded"
        again = server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})
        assert again.status_code == 200, "it is not paused"


def sleeps(server: RunningServer) -> bool:
    """Whether a process says that the first model sleeps, and what to do."""
    refused = ask(server, "one")
    is_told = refused.status_code == 503 and "POST /wake" in refused.json()["error"]["message"]
    is_shown = states(server)["one"] == "unloaded"
    return is_told and is_shown and server.get("/health").json()["status"] == "asleep"


def test_several_processes_serve_several_models_and_end_by_a_route(
    tmp_path: Path, fake_environment: dict[str, str]
) -> None:
    with running_server(
        *flags(tmp_path), "--api-workers=2", environment=fake_environment
    ) as server:
        for _ in range(4):
            assert ask(server, "two").json()["model"] == "two"
            assert ask(server, "uno").json()["model"] == "one"
        assert states(server)["two"] == "loaded"
        for _ in range(6):  # whichever process answers, each with a connection of its own
            reset = server.post("/reset_prefix_cache", headers=ADMIN).json()["reset"]
            assert set(reset) == {"one", "two"}
            assert of_model(server, "two", "request_success_total") == 4
            assert of_model(server, "two", "generation_tokens_total") == 12
        body = {"model": "two"}
        wait_until(lambda: server.post("/v1/models/unload", body, headers=ADMIN).status_code == 200)
        assert ask(server, "two").status_code == 200
        assert server.post("/sleep", headers=ADMIN).status_code == 200
        wait_until(lambda: all(sleeps(server) for _ in range(4)))  # each of them knows of it
        assert server.post("/wake", headers=ADMIN).status_code == 200
        wait_until(lambda: ask(server, "one").status_code == 200)
        assert server.post("/shutdown", headers=ADMIN).status_code == 200
        assert server.process.wait(PATIENCE_S) == 0


def test_a_model_without_requests_is_unloaded(
    tmp_path: Path, fake_environment: dict[str, str]
) -> None:
    with running_server(
        *flags(tmp_path), "--idle-unload-s=0.2", environment=fake_environment
    ) as server:
        assert ask(server, "two").status_code == 200
        wait_until(lambda: states(server)["two"] == "unloaded")
        assert ask(server, "two").status_code == 200


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_model_is_unloaded_too_and_the_next_request_loads_it(
    tmp_path: Path, fake_environment: dict[str, str], workers: int
) -> None:
    more = ("--idle-unload-s=0.2", f"--api-workers={workers}")
    with running_server(*flags(tmp_path), *more, environment=fake_environment) as server:
        for stream in (False, True):
            wait_until(lambda: states(server)["one"] == "unloaded")
            assert server.get("/health").status_code == 200
            answer = ask(server, "two")
            assert answer.status_code == 200, answer.text
            assert states(server)["one"] == "unloaded"
            answer = ask(server, None, stream=stream)
            assert answer.status_code == 200, answer.text
            assert "error" not in answer.text
            wait_until(lambda: is_shown_loaded(server, "one"))


def test_the_only_model_is_unloaded_and_loaded_again(fake_server: MakeFake) -> None:
    with fake_server("--idle-unload-s=0.2") as server:
        for model in (None, server.get("/v1/models").json()["data"][0]["id"]):
            wait_until(lambda: "unloaded" in states(server).values())
            answer = ask(server, model)
            assert answer.status_code == 200, answer.text
        wait_until(lambda: is_shown_loaded(server, "fake"))


def test_a_model_that_an_operator_had_sleep_is_woken_by_no_request(
    tmp_path: Path, fake_environment: dict[str, str]
) -> None:
    with running_server(
        *flags(tmp_path), "--idle-unload-s=1000", environment=fake_environment
    ) as server:
        assert server.post("/sleep", headers=ADMIN).status_code == 200
        assert ask(server, None).status_code == 503
        assert server.post("/wake", headers=ADMIN).status_code == 200
        assert ask(server, None).status_code == 200


def test_without_an_admin_key_the_routes_say_what_is_missing(fake_server: MakeFake) -> None:
    with fake_server() as server:
        answer = server.post("/shutdown")
        assert answer.status_code == 403
        assert "--admin-key" in answer.json()["error"]["message"]


def test_nothing_is_loaded_for_a_key_that_may_not_use_it(
    tmp_path: Path, fake_environment: dict[str, str]
) -> None:
    record = {"name": "bob", "sha256": digest_of("secret"), "models": ["one"]}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [record]}))
    keys = f"--api-keys-file={tmp_path / 'keys.json'}"
    bob = {"authorization": "Bearer secret"}
    with running_server(*flags(tmp_path), keys, environment=fake_environment) as server:
        for model, stream, status in (("two", True, 403), ("two", False, 403), ("one", False, 200)):
            body = {"prompt": "ab", "max_tokens": 3, "model": model, "stream": stream}
            answer = server.post("/v1/completions", body, headers=bob)
            assert answer.status_code == status, answer.text
        cards = server.get("/v1/models", headers=bob).json()["data"]
        assert {card["id"]: card.get("state") for card in cards}["two"] == "unloaded"


def test_a_key_opens_a_model_by_each_of_its_names(
    tmp_path: Path, fake_environment: dict[str, str]
) -> None:
    """Of the first model and of one that is loaded on demand."""
    records = [
        {"name": name, "sha256": digest_of(name), "models": [name]} for name in ("uno", "due")
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": records}))
    keys = f"--api-keys-file={tmp_path / 'keys.json'}"
    with running_server(*flags(tmp_path), keys, environment=fake_environment) as server:
        for key, own, other in (("uno", "one", "two"), ("due", "two", "uno")):
            told = {"authorization": f"Bearer {key}"}
            for model, status in ((key, 200), (own, 200), (other, 403)):
                body = {"prompt": "ab", "max_tokens": 3, "model": model}
                answer = server.post("/v1/completions", body, headers=told)
                assert answer.status_code == status, (key, model, answer.text)
                counted = server.post("/tokenize", {"prompt": "ab", "model": model}, headers=told)
                assert counted.status_code == status, (key, model, counted.text)


def on_socket(path: Path, method: str, route: str, body: object = None) -> httpx.Response:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=PATIENCE_S) as client:
        return client.request(method, f"http://vllmx{route}", json=body)


def test_operators_have_a_socket_of_their_own(
    tmp_path: Path, fake_environment: dict[str, str]
) -> None:
    path = tmp_path / "admin.sock"
    more = (f"--admin-uds={path}", "--api-workers=2", "--api-key=user")
    with running_server(*flags(tmp_path), *more, environment=fake_environment) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        loaded = on_socket(path, "POST", "/v1/models/load", {"model": "two"})
        assert loaded.json()["state"] == "loaded", loaded.text
        assert on_socket(path, "GET", "/health").status_code == 200
        assert on_socket(path, "POST", "/v1/completions", {"prompt": "a"}).status_code == 404
        for route in ("/v1/models/load", "/sleep", "/shutdown"):
            refused = server.post(route, {"model": "two"}, headers=ADMIN)
            assert refused.status_code in (404, 405), refused.text
        assert on_socket(path, "POST", "/shutdown").json() == {"status": "draining"}
        assert server.process.wait(PATIENCE_S) == 0
    assert not path.exists()
