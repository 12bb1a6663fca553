"""KV blocks in a real Redis server, where one is installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.errors import ConfigError
from vllmx_core.redis_store import RedisStore

from tests.usable_backends import backend_spec
from tests.waiting import wait_until

PROMPT = list(range(40, 140))
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True)


class Server:
    """A Redis server behind a password."""

    def __init__(self, redis: Any, path: str, folder: Path) -> None:
        self.redis, self._folder, self._path = redis, folder, path
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"redis://:word@127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [self._path, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--requirepass", "word", "--dir", str(self._folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(self.answers)

    def answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    redis = pytest.importorskip("redis", reason="pip install 'vllmx[redis]'")
    path = shutil.which("redis-server")
    if path is None:
        pytest.skip("there is no redis-server: apt-get install redis-server")
    server = Server(redis, path, tmp_path)
    yield server
    server.stop()


def test_the_store_keeps_its_protocol(server: Server) -> None:
    one, other = (RedisStore(server.address, space) for space in ("one", "other"))
    secrets = [
        store.secret(bytes((number,)) * 32) for number, store in enumerate((one, one, other))
    ]
    assert secrets == [bytes(32), bytes(32), b"\2" * 32]
    names = [bytes((number,)) * 17 for number in range(3)]
    one.put([(names[0], b"a" * 70_000), (names[2], b"c")])
    assert one.has(names) == [True, False, True]
    assert one.get(names) == [b"a" * 70_000, None, b"c"]
    assert other.get(names) == [None, None, None]
    one.put([(names[2], b"d")])
    other.put([(names[1], b"e")])
    one.clear()
    assert one.has(names) == [False, False, False]
    assert other.get(names) == [None, b"e", None]
    assert one.secret(b"\3" * 32) == bytes(32)
    one.close()


def answer(llm: LLM) -> tuple[int, Any]:
    """The cached tokens of the prompt, and the log-probabilities of its answer."""
    (found,) = llm.generate([PROMPT], PARAMS)
    return found.num_cached_tokens, found.outputs[0].logprobs


def test_engines_share_a_server_that_damages_and_goes(server: Server) -> None:
    """All answers have the same bits, whatever becomes of the store."""
    backend_spec("cpu")
    config: dict[str, Any] = {
        "backend": "cpu",
        "num_kv_blocks": 16,
        "max_model_len": 200,
        "kv_connector": f"redis:{server.address}",
    }
    with LLM("demo", **config) as llm:
        cached, right = answer(llm)
        assert cached == 0
    with LLM("demo", **config) as llm:
        assert answer(llm) == (96, right)
    client = server.redis.Redis.from_url(server.address)
    blocks = sorted(name for name in client.scan_iter() if len(name) > 50)
    assert len(blocks) == 6
    for name in blocks:
        client.setrange(name, 300, b"damaged")
    with LLM("demo", **config) as llm:
        assert answer(llm) == (0, right)
        server.stop()
        assert llm.generate([PROMPT[::-1]], PARAMS)[0].outputs[0].token_ids
    with LLM("demo", **config) as llm:
        assert answer(llm) == (0, right), "it starts without the store"


def test_addresses_that_make_no_sense_are_refused() -> None:
    pytest.importorskip("redis", reason="pip install 'vllmx[redis]'")
    with pytest.raises(ConfigError, match=r"--kv-connector redis: .*: give HOST:PORT or a URL"):
        RedisStore("http://:secret@host", "space")
    with pytest.raises(ConfigError, match="give HOST:PORT") as caught:
        RedisStore("localhost:number", "space")
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("vllmx_core.redis_store.import_module", fails)
    with pytest.raises(ConfigError, match=r"pip install 'vllmx\[redis\]'"):
        RedisStore("localhost", "space")
