"""Keys in a file: what their holders may do, how much of it, and what they have used."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllmx_core.sampling import SamplingParams
from vllmx_server.errors import ForbiddenError, RateLimitError
from vllmx_server.host.workers.peers import RemoteLimiter
from vllmx_server.host.workers.supervisor import WorkerLimiter
from vllmx_server.limits.key_records import digest_of
from vllmx_server.limits.keys import ApiKeys
from vllmx_server.limits.rate_limiter import KeyLimiter, Reservation, Used

from tests.waiting import PATIENCE_S, until

from .conftest import MakeServer, Served
from .test_batches import begin, content, ended, line
from .test_workers import channels


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def key_file(folder: Path, **records: dict[str, Any]) -> str:
    """A file in which the key of each name is "secret-NAME"."""
    listed = [
        {"name": name, "sha256": digest_of(f"secret-{name}"), **fields}
        for name, fields in records.items()
    ]
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": listed}))
    return str(path)


def desk_of(folder: Path, clock: Clock, **fields: Any) -> KeyLimiter:
    return KeyLimiter(ApiKeys(path=key_file(folder, ann=fields)), clock)


def want(num_tokens: int = 0) -> Reservation:
    return Reservation(key="key-ann", model="m", num_tokens=num_tokens)


async def ask(served: Served, name: str | None, **body: Any) -> httpx.Response:
    headers = {} if name is None else {"authorization": f"Bearer secret-{name}"}
    body = {"prompt": "ab", "max_tokens": 4, "ignore_eos": True, **body}
    return await served.client.post("/v1/completions", json=body, headers=headers)


async def test_requests_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    limiter = desk_of(tmp_path, clock, requests_per_minute=3)
    granted = [await limiter.reserve(want()) for _ in range(3)]
    assert granted[-1].headers == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
    }
    with pytest.raises(RateLimitError, match="3 requests a minute") as caught:
        await limiter.reserve(want())
    assert caught.value.retry_after_s == pytest.approx(20)
    clock.now_s += 20
    await limiter.reserve(want())
    with pytest.raises(RateLimitError):
        await limiter.reserve(want())
    clock.now_s -= 500  # a clock that jumps back gives nothing and takes nothing
    with pytest.raises(RateLimitError):
        await limiter.reserve(want())
    clock.now_s += 1e9
    for _ in range(3):
        await limiter.reserve(want())
    with pytest.raises(RateLimitError):
        await limiter.reserve(want())


async def test_tokens_are_reserved_and_settled(tmp_path: Path) -> None:
    clock = Clock()
    limiter = desk_of(tmp_path, clock, tokens_per_minute=600)
    first = await limiter.reserve(want(500))
    with pytest.raises(RateLimitError, match="600 tokens a minute") as caught:
        await limiter.reserve(want(200))
    assert caught.value.retry_after_s == pytest.approx(10)
    await limiter.settle(Used(ticket=first.ticket, num_tokens=100))
    await limiter.settle(Used(ticket=first.ticket, num_tokens=100))  # a second time is ignored
    second = await limiter.reserve(want(500))
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    await limiter.settle(Used(ticket=second.ticket, num_tokens=1100))  # 600 more than reserved
    with pytest.raises(RateLimitError) as caught:
        await limiter.reserve(want(1))
    assert caught.value.retry_after_s == pytest.approx(60.1)
    clock.now_s += 1000
    await limiter.reserve(want(10_000))  # more than a minute has: it waits for all of it, no longer


async def test_requests_at_a_time(tmp_path: Path) -> None:
    limiter = desk_of(tmp_path, Clock(), concurrency=2)
    first, _ = await limiter.reserve(want()), await limiter.reserve(want())
    with pytest.raises(RateLimitError, match="2 requests at a time"):
        await limiter.reserve(want())
    await limiter.settle(Used(ticket=first.ticket, num_tokens=0))
    await limiter.reserve(want())


async def test_limits_that_change_keep_what_is_left(tmp_path: Path) -> None:
    clock = Clock()
    limiter = desk_of(tmp_path, clock, requests_per_minute=2)
    await limiter.reserve(want())
    key_file(tmp_path, ann={"requests_per_minute": 20})
    limiter.keys.reload()
    granted = await limiter.reserve(want())
    assert granted.headers["x-ratelimit-remaining-requests"] == "9"


async def test_another_process_asks_the_same_desk(tmp_path: Path) -> None:
    limiter = desk_of(tmp_path, Clock(), requests_per_minute=60, concurrency=1)
    async with channels() as (supervisor, worker):
        served, remote = WorkerLimiter(limiter, supervisor), RemoteLimiter(worker)
        granted = await remote.reserve(want(5))
        assert granted.headers["x-ratelimit-limit-requests"] == "60"
        with pytest.raises(RateLimitError, match="at a time") as caught:
            await remote.reserve(want())
        assert caught.value.http_status == 429
        assert caught.value.retry_after_s == 1.0
        assert (caught.value.headers or {})["x-ratelimit-remaining-requests"] == "59"
        await served.close()  # the worker died: its requests are no longer there
        await remote.reserve(want())


async def test_who_may_and_who_may_not(tmp_path: Path, make_server: MakeServer) -> None:
    path = key_file(tmp_path, ann={}, bob={"models": ["other"]}, eve={"priority_range": "5:9"})
    flags = {"api_keys_file": path, "api_key": ("plain",), "enable_tokenizer_info_endpoint": True}
    async with make_server(flags) as served:
        assert (await ask(served, None)).status_code == 401
        for name, status in (("ann", 200), ("bob", 403)):
            headers = {"authorization": f"Bearer secret-{name}"}
            told = await served.client.get("/tokenizer_info", headers=headers)
            assert told.status_code == status
        assert (await ask(served, "nobody")).status_code == 401
        assert (await ask(served, "ann")).status_code == 200
        forbidden = await ask(served, "bob")
        assert forbidden.status_code == 403
        assert forbidden.json()["error"]["type"] == "permission_error"
        assert "it may use: other" in forbidden.json()["error"]["message"]
        assert (await ask(served, "eve", priority=5)).status_code == 200
        assert (await ask(served, "eve", priority=4)).status_code == 400
        plain = {"x-api-key": "plain"}
        body = {"prompt": "a", "max_tokens": 1}
        assert (await served.client.post("/v1/completions", json=body, headers=plain)).is_success
        assert await served.server.drain(PATIENCE_S)  # nothing is left in flight


def test_who_may_use_which_mcp_server(tmp_path: Path) -> None:
    """All of them everybody's, until one key names any."""
    keys = ApiKeys(("plain",), key_file(tmp_path, ann={}, bob={}))
    for client in ("key-ann", "key-bob", "plain", ""):
        keys.holder(client).check_mcp_server("tickets", "tools")
    key_file(tmp_path, ann={"mcp_servers": ["tickets"]}, bob={})
    keys.reload()
    keys.holder("key-ann").check_mcp_server("tickets", "tools")
    plain = keys.find(hashlib.sha256(b"plain").digest())
    assert plain is not None
    for holder, server, allowed in (
        (keys.holder("key-ann"), "files", "tickets"),
        (keys.holder("key-bob"), "tickets", "none"),
        (plain, "tickets", "none"),
        (keys.holder("key-gone"), "tickets", "none"),
    ):
        with pytest.raises(ForbiddenError, match=f"may use: {allowed}"):
            holder.check_mcp_server(server, "tools")
    key_file(tmp_path, ann={"mcp_servers": []}, bob={})
    keys.reload()
    with pytest.raises(ForbiddenError):
        keys.holder("key-bob").check_mcp_server("tickets", "tools")


async def test_answers_say_what_is_left_and_refusals_when_to_come_back(
    tmp_path: Path, make_server: MakeServer
) -> None:
    path = key_file(tmp_path, ann={"requests_per_minute": 2, "tokens_per_minute": 1000}, bob={})
    async with make_server({"api_keys_file": path}) as served:
        served.state.limiter.clock = Clock()  # type: ignore[attr-defined]
        first = await ask(served, "ann")
        assert first.headers["x-ratelimit-limit-tokens"] == "1000"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        streamed = await ask(served, "ann", stream=True)
        assert streamed.headers["x-ratelimit-remaining-requests"] == "0"
        refused = await ask(served, "ann")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "30"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-limit-tokens"] == "1000"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        other = await ask(served, "bob")
        assert other.status_code == 200
        assert not any(name.startswith("x-ratelimit") for name in other.headers)
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        told = {"x-api-key": "secret-ann"}
        messages = await served.client.post("/v1/messages", json=chat, headers=told)
        assert messages.status_code == 429
        assert messages.json()["error"]["type"] == "rate_limit_error"
        assert await served.server.drain(PATIENCE_S)  # nothing is left in flight


async def test_a_batch_gets_no_model_that_its_key_may_not_use(
    tmp_path: Path, make_server: MakeServer
) -> None:
    path = key_file(tmp_path, bob={"models": ["other"], "requests_per_minute": 1}, ann={})
    async with make_server({"api_keys_file": path}) as served:
        for name, expected in (("bob", 403), ("ann", 200)):
            served.client.headers["authorization"] = f"Bearer secret-{name}"
            batch = await ended(served, await begin(served, [line(n) for n in ("a", "b", "c")]))
            kept = batch["error_file_id"] or batch["output_file_id"]
            records = await content(served, kept)
            assert [each["response"]["status_code"] for each in records] == [expected] * 3


async def test_usage_is_counted_and_kept(tmp_path: Path, make_server: MakeServer) -> None:
    path = key_file(tmp_path, ann={"requests_per_minute": 2}, root={"admin": True}, bob={})
    settings = {"api_keys_file": path, "data_dir": str(tmp_path / "data")}
    async with make_server(settings) as served:
        served.state.limiter.clock = Clock()  # type: ignore[attr-defined]
        usage = (await ask(served, "ann")).json()["usage"]
        await ask(served, "ann", stream=True)
        assert (await ask(served, "ann")).status_code == 429
        own = await served.client.get("/v1/usage", headers={"authorization": "Bearer secret-ann"})
        expected = {
            "object": "key_usage",
            "key": "ann",
            "requests": 2,
            "refused": 1,
            "prompt_tokens": 2 * usage["prompt_tokens"],
            "cached_tokens": 0,
            "completion_tokens": 2 * usage["completion_tokens"],
        }
        assert own.json() == {"object": "list", "data": [expected]}
        await served.server.drain(PATIENCE_S)
    async with make_server(settings) as served:
        await ask(served, "bob")
        everybody = await served.client.get("/v1/usage", headers={"x-api-key": "secret-root"})
        rows = {row["key"]: row for row in everybody.json()["data"]}
        assert rows["ann"] == expected
        assert rows["bob"]["requests"] == 1
        assert set(rows) == {"ann", "bob", "root"}
        assert (await served.client.get("/v1/usage")).status_code == 401


async def test_a_server_reads_its_keys_again(
    tmp_path: Path, make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    path = key_file(tmp_path, ann={})
    async with make_server({"api_keys_file": path}) as served:
        key_file(tmp_path, bob={"priority_range": "3:4"})
        served.server.reload()
        assert (await ask(served, "ann")).status_code == 401
        assert (await ask(served, "bob", priority=3)).status_code == 200
        Path(path).write_text("{")
        served.server.reload()
        assert "the keys stay as they are" in caplog.text
        assert (await ask(served, "bob", priority=3)).status_code == 200


async def test_a_key_with_many_requests_delays_others_by_its_share_alone(
    tmp_path: Path, make_server: MakeServer
) -> None:
    path = key_file(tmp_path, ann={}, bob={"share": 3.0}, eve={})
    engine = {"max_num_seqs": 1}
    fake = {"step_s": 0.004, "max_model_len": 16000}
    async with make_server({"api_keys_file": path}, engine, **fake) as served:
        ended: list[str] = []

        async def one(name: str) -> None:
            assert (await ask(served, name)).status_code == 200
            ended.append(name)

        params = SamplingParams(max_tokens=15000, ignore_eos=True)  # for a minute
        running = await served.llm.submit("a", params)
        async with asyncio.TaskGroup() as group:
            for count, name in ((20, "ann"), (20, "bob"), (1, "eve")):
                for _ in range(count):
                    group.create_task(one(name))
                await until(lambda: served.llm.num_in_flight >= 1 + len(group._tasks))
            assert not ended  # all of them wait, the greedy one's first
            running.abort()
        assert ended.index("eve") < 8
        assert 11 <= ended[:20].count("bob") <= 18


@pytest.mark.parametrize(("names", "most"), [(("ann", "eve"), 6), (("ann",), 12)])
async def test_no_key_fills_the_queue_alone(
    tmp_path: Path, make_server: MakeServer, names: tuple[str, ...], most: int
) -> None:
    """What a key has in flight may not be more than is left for others, where there are any."""
    path = key_file(tmp_path, **{name: {} for name in names})
    engine = {"max_num_seqs": 2, "max_queue": 10}
    async with make_server(
        {"api_keys_file": path}, engine, step_s=0.01, max_model_len=16000
    ) as served:
        whole = await ask(served, "ann", n=most + 1)
        assert whole.status_code == 400
        assert f"at most 2 run and {most - 2} wait" in whole.json()["error"]["message"]
        long = [asyncio.create_task(ask(served, "ann", max_tokens=15000)) for _ in range(most)]
        await in_flight(served, most)
        refused = await ask(served, "ann")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        if "eve" in names:
            assert "nobody may have more than are left" in refused.json()["error"]["message"]
            long.append(asyncio.create_task(ask(served, "eve", max_tokens=15000)))
            await in_flight(served, most + 1)
        for task in long:
            task.cancel()
        await asyncio.wait(long)


async def in_flight(served: Served, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while served.llm.num_in_flight < count:
            await asyncio.sleep(0.01)
