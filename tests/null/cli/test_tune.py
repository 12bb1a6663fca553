"""`vllmx tune`: promises as they are written, the search on simulated servers, and a real one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from vllmx.bench.sse_client import Streamed
from vllmx.cli.tune import tune
from vllmx.sizing.promise import parse_promise
from vllmx.sizing.trials import clean_environment, keeps_up, trial
from vllmx.sizing.tuning import Knob, Search, Served, Setting, Trial, knobs
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError
from vllmx_testing.fake_checkpoint import install_fake_plugin, make_fake_checkpoint


def test_promises_are_read() -> None:
    found = [(each.measure, each.share, each.seconds) for each in parse_promise(SLO)]
    assert found == [("ttft", "p99", 0.5), ("itl", "p95", 0.05), ("e2e", "p50", 2.0)]


SLO = "ttft<500ms, itl.p95 < 50ms,E2E_p50<=2s"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft=500ms", "'ttft=500ms': a promise is written as"),
        ("", "'': a promise is written as"),
        ("latency<5s", "the measure 'latency' in 'latency<5s'; known: ttft, itl, tpot, e2e"),
        ("ttft.p90<5s", "the percentile 'p90'"),
        ("ttft<500", "the unit '' in 'ttft<500'; known: ms, s"),
        ("itl<0ms", "a limit is above 0"),
        ("itl<5ms,itl.p99<6ms", "--slo limits itl p99 twice"),
        ("itl<" + "9" * 400 + "s", "a limit is above 0 and at most a day"),
    ],
)
def test_wrong_promises_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_promise(text)
    assert said in raised.value.message


def figures(rate: float, ttft_s: float) -> Trial:
    return Trial(rate, 10, 0, True, rate * 64, 8, {"ttft p99": ttft_s, "ttft p50": ttft_s})


class Simulated:
    """Servers whose time to the first token is 0.1 s up to a capacity, and grows behind it."""

    def __init__(
        self,
        capacity: dict[int, float],
        luck: float = 1.0,
        hiccups: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.capacity = capacity
        self.luck = luck
        self.hiccups = hiccups
        """Whether something else has the machine in the trial of a number."""
        self.alone_s = [1.0, 1.1, 1.0]
        self.trials: list[tuple[int, float, int]] = []

    @contextmanager
    def serve(self, setting: Setting) -> Iterator[Served]:
        threads = int(setting.get("num_threads", 4))
        if threads not in self.capacity:
            raise ConfigError(f"{threads} threads are not there: take fewer")

        def measure(rate: float, seed: int) -> Trial:
            self.trials.append((threads, rate, seed))
            capacity = self.capacity[threads] * (self.luck if seed < 3 else 1.0)
            ttft_s = 0.1 * max(1.0, rate / capacity)
            hiccup = self.hiccups(len(self.trials))
            return figures(rate, max(ttft_s, 5.0) if hiccup else ttft_s)

        yield Served(figures(1.0, 0.1), self.alone_s, measure)

    def search(self, slo: str, max_rate: float = math.inf) -> Search:
        return Search(self.serve, parse_promise(slo), 0.1, max_rate, lambda *_: None)


def threads(*values: int) -> list[Knob]:
    return [Knob("num_threads", lambda _: values)]


def test_the_highest_rate_is_found_within_the_precision() -> None:
    servers = Simulated({4: 37.0})
    best = servers.search("ttft<112ms").run({}, [])
    assert 37.0 / 1.1 <= best.rate <= 37.4
    assert len(servers.trials) < 22
    assert servers.trials[-1][2] >= 3  # with other requests


def test_a_rate_below_the_first_one_is_found_too() -> None:
    best = Simulated({4: 0.2}).search("ttft<112ms").run({}, [])
    assert 0.2 / 1.1 <= best.rate <= 0.202


def test_settings_that_do_not_beat_the_best_take_one_trial() -> None:
    servers = Simulated({4: 37.0, 3: 36.0, 2: 10.0, 1: 100.0})
    search = servers.search("ttft<112ms")
    best = search.run({"model": "m"}, threads(3, 2, 9, 1))
    assert best.setting == {"model": "m", "num_threads": 1}
    assert 100.0 / 1.1 <= best.rate <= 101.0
    tried = [count for count, _, seed in servers.trials if seed == 0]
    assert (tried.count(3), tried.count(2)) == (1, 1)
    assert not search.doubts
    assert [each.error for each in search.outcomes if each.error] == [
        "9 threads are not there: take fewer"
    ]


def test_no_more_is_tried_than_was_asked_for() -> None:
    servers = Simulated({4: 37.0, 2: 50.0})
    best = servers.search("ttft<112ms", max_rate=20.0).run({}, threads(2))
    assert best.rate == 20.0
    assert max(rate for _, rate, _ in servers.trials) == 20.0
    assert {count for count, _, _ in servers.trials} == {4}


def test_luck_in_the_search_is_not_promised() -> None:
    """Requests that the search has not seen decide in the end."""
    best = Simulated({4: 30.0}, luck=1.2).search("ttft<112ms").run({}, [])
    assert best.rate <= 30.3
    none = Simulated({4: 1.0}, luck=100.0).search("ttft<112ms").run({}, [])
    assert none.held is None
    assert none.missed is not None


def test_nothing_keeps_the_promise() -> None:
    """Requests without load show it, before any trial."""
    servers = Simulated({4: 37.0, 2: 1.0})
    search = servers.search("ttft<50ms")
    best = search.run({}, threads(2))
    assert best.held is None
    assert [each.missed is not None for each in search.outcomes] == [True, True]
    assert not servers.trials


def test_a_limit_is_kept_with_a_margin() -> None:
    servers = Simulated({4: 37.0})
    best = servers.search("ttft<105ms").run({}, [])
    assert best.held is None
    assert best.missed is not None
    assert best.missed.faults(parse_promise("ttft<105ms")) == [
        "ttft p99 is 100 ms, too near to 105 ms to be promised"
    ]


@pytest.mark.parametrize("every", [3, 4, 5, 7])
def test_a_machine_that_does_other_things_is_told_of(every: int) -> None:
    """Each third trial, say, meets something else: the same rate is found nearly, and the search
    says that it had to look twice."""
    servers = Simulated({4: 37.0}, hiccups=lambda number: number % every == 1)
    search = servers.search("ttft<112ms")
    best = search.run({}, [])
    assert 37.0 / 1.3 <= best.rate <= 37.4
    (doubt,) = search.doubts
    assert doubt.endswith("one trial kept the promise and another did not")


def test_times_of_a_request_alone_are_compared() -> None:
    servers = Simulated({4: 37.0})
    servers.alone_s = [0.4, 0.5, 0.9]
    search = servers.search("ttft<112ms")
    assert search.run({}, []).held is not None
    assert search.doubts == ["one request alone took 400 ms to 900 ms"] * 2


def streamed(sent: float, *events: float, error: str | None = None) -> Streamed:
    return Streamed(sent, list(events), len(events), error)


def test_figures_of_a_trial_by_hand() -> None:
    found = trial(
        2.0, [streamed(0.0, 0.5, 0.6, 1.0), streamed(1.0, 1.1, 1.2, 1.5), streamed(1, error="no")]
    )
    assert found.figures["ttft p50"] == pytest.approx(0.3)
    assert found.figures["itl p50"] == pytest.approx(0.2)
    assert found.figures["tpot p50"] == pytest.approx(0.225)
    assert found.figures["e2e p50"] == pytest.approx(0.75)
    assert found.tokens_per_s == pytest.approx(6 / 1.5)
    assert (found.requests, found.failed, found.peak, found.error) == (3, 1, 1, "no")
    assert found.faults(parse_promise("e2e<600ms")) == [
        "e2e p99 is 995 ms, not under 600 ms",
        "1 of 3 requests failed: no",
    ]
    nothing = trial(2.0, [streamed(0.0, error="no")])
    assert nothing.faults(parse_promise("e2e<1s"))[0] == "1 of 1 requests failed: no"


def test_a_backlog_that_grows_is_seen() -> None:
    assert keeps_up([(n, n + 5.0) for n in range(100)])
    assert not keeps_up([(n, 2.0 * n + 5.0) for n in range(100)])
    assert not keeps_up([])


def test_what_is_given_is_left_alone() -> None:
    limits = parse_promise("itl<50ms")
    found = {each.name for each in knobs(EngineConfig(max_num_seqs=8), limits, 4, ())}
    assert found == {"isq", "num_threads", "target_itl", "max_num_batched_tokens"}
    variables = {"VLLMX_NUM_THREADS": "1", "VLLMX_API_KEY": "k", "VLLMX_CPU_ISA": "avx2"}
    assert clean_environment(variables) == {"VLLMX_CPU_ISA": "avx2"}


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fake_checkpoint(tmp_path_factory.mktemp("tune") / "model", vocab_size=2000)


def run(
    fake: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *flags: str,
    output: str = "out.yaml",
) -> Result:
    plugins = install_fake_plugin(tmp_path / "plugins")
    monkeypatch.setenv("PYTHONPATH", str(plugins))
    monkeypatch.syspath_prepend(str(plugins))
    short = ("--seconds", "0.1", "--requests", "2", "--input-len", "4", "--output-len", "3")
    arguments = [str(fake), "--backend", "fake", *short, "-o", str(tmp_path / output), *flags]
    return CliRunner().invoke(tune, arguments)


def test_a_file_is_written_that_a_server_takes(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise is one that any machine keeps, at the greatest rate that is tried."""
    config = tmp_path / "serve.yaml"
    config.write_text("max-num-seqs: 7\nport: 9000\napi-key: [secret]\n")
    flags = ("--slo", "e2e<3600s", "--max-rate", "5", "--config", str(config))
    done = run(fake, tmp_path, monkeypatch, *flags, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["best"]["held"]["rate"] == 5.0
    path = tmp_path / "out.yaml"
    assert path.stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load(path.read_text()) == {
        "model": str(fake),
        "backend": "fake",
        "max-num-seqs": 7,
        "port": 9000,
        "api-key": ["secret"],
    }


def test_a_promise_that_nothing_keeps_ends_with_1(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--target-itl", "9", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")
    done = run(fake, tmp_path, monkeypatch, "--slo", "ttft<0.0001ms", *given)
    assert done.exit_code == 1, (done.output, done.exception)
    assert "no setting keeps ttft p99 under 0.0001 ms:" in done.stdout
    assert not (tmp_path / "out.yaml").exists()


def test_what_cannot_be_measured_is_said(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = tmp_path / "several.yaml"
    several.write_text("models: [{name: a, model: a}]\n")
    for flags, said in (
        (("--max-rate", "-1"), "--max-rate must be above 0, got -1.0"),
        (("--config", str(several)), "--config lists several models, and one is tuned"),
        (("--max-model-len", "5"), "give --input-len and --output-len that the model has room for"),
        (("--num-kv-blocks", "0"), "--num-kv-blocks must be between"),
    ):
        done = run(fake, tmp_path, monkeypatch, "--slo", "e2e<5s", *flags)
        assert said in str(done.exception), (flags, done.output)
    (tmp_path / "out.yaml").touch()
    done = run(fake, tmp_path, monkeypatch, "--slo", "e2e<5s")
    assert "out.yaml exists: say --overwrite" in str(done.exception)
    done = run(fake, tmp_path, monkeypatch, "--slo", "e2e<5s", output="none/out.yaml")
    assert "out.yaml: name a file in a folder that is there" in str(done.exception)
