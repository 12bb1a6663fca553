"""Random requests, aborts and steps over random small engines: what must hold, holds.

Outputs are compared with the fake model's definition, which knows nothing of batches: so they
depend neither on chunking, preemption, prefix hits and batch mates, nor on the overlap or on aborts
of others.
"""

from __future__ import annotations

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vllmx_core.model import DraftSpec
from vllmx_testing.fake import FakeRules

from .harness import EOS, VOCAB_SIZE, Harness
from .kv_stores import FakeStore

TOKENS = st.integers(0, VOCAB_SIZE - 1)
NAN = 11

ENGINES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(4, 30),
        "max_tokens": st.integers(1, 40),
        "max_logit_rows": st.integers(1, 12),
        "num_stages": st.sampled_from([1, 1, 2, 3, 5]),
    }
)
CONFIGS = st.fixed_dictionaries(
    {
        "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "enable_chunked_prefill": st.sampled_from([True, True, False]),
        "scheduling_policy": st.sampled_from(["priority", "fcfs"]),
        "max_num_seqs": st.integers(1, 8),
        "target_itl": st.sampled_from(["none", "auto", "1"]),
        "state_snapshot_tokens": st.sampled_from([1, 20, 1000]),
        "session_share": st.sampled_from([0.0, 0.3, 1.0]),
        "priority_reserve": st.sampled_from([0.0, 0.4]),
        "session_limit": st.sampled_from([1, 2, 64]),
    }
)
# of cache groups: one without a window, as most models have it, or up to three of any kind
WINDOWS: st.SearchStrategy[tuple[int | None, ...]] = st.just((None,)) | st.lists(
    st.none() | st.sampled_from([1, 2, 7, 8, 9, 13, 21, 33]), min_size=1, max_size=3
).map(tuple)
# of states: none, or so many slots beside one for each sequence
SPARE_SLOTS = st.none() | st.integers(0, 12)
# of drafts: none, or the share that is wrong, with a fixed number of tokens or as many as pay
DRAFTS = st.none() | st.tuples(
    st.sampled_from([0.0, 0.3, 1.0]), st.none() | st.sampled_from([1, 2, 5, 16])
)
# of draft models: one with pages of its own, of hidden states, or of blocks; models of stages, and
# of windows alone, have none
DRAFT_MODELS = st.none() | st.tuples(
    st.sampled_from([None, DraftSpec((0,), (8,), 8), DraftSpec((0,), (8,), 8, 5, 1)]),
    st.sampled_from(["auto", "1", "3", "16"]),
)
# of tiers below the device: none, memory, a folder or a shared store, with room for few blocks
# or for many
TIERS: st.SearchStrategy[dict[str, Any]] = st.just({}) | st.fixed_dictionaries(
    {},
    optional={
        "kv_host_memory": st.sampled_from([1, 700, 1 << 20]),
        "kv_disk": st.just("kv"),
        "kv_disk_size": st.sampled_from([400, 3000, 1 << 20]),
        "kv_connector": st.just("fake"),
    },
)
PARAMS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.7]),
            "top_k": st.integers(0, 5),
            "min_tokens": st.just(1),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
            "logit_bias": st.dictionaries(TOKENS, st.sampled_from([60.0, 1.0]), max_size=2),
            "allowed_token_ids": st.none() | st.lists(TOKENS, min_size=1, max_size=9),
            "logprobs": st.none() | st.integers(0, 3),
            "prompt_logprobs": st.none() | st.none() | st.integers(0, 2),
        },
    ),
)
# prompts share beginnings, so that the prefix cache has something to find
BEGINNINGS = st.sampled_from([[], list(range(20, 28)), list(range(20, 47)), [5] * 16])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(-1, 1),
        "client": st.sampled_from(["", "a", "b"]),
        "cache_salt": st.sampled_from(["", "s"]),
        "session_id": st.sampled_from(["", "one", "two", "three"]),
        "adapter": st.sampled_from(["", "x", "y", "z"]),
        "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=2), max_size=30),
        "stop_ids": st.lists(TOKENS, max_size=3),
    },
)


class EngineMachine(RuleBasedStateMachine):
    """Users of one engine."""

    @initialize(
        model=ENGINES,
        config=CONFIGS,
        nan=st.booleans(),
        step_s=st.sampled_from([0.0, 1e-5]),
        windows=WINDOWS,
        spare_slots=SPARE_SLOTS,
        run_blocks=st.sampled_from([1, 2, 3, 64]),
        drafts=DRAFTS,
        draft_model=DRAFT_MODELS,
        tiers=TIERS,
        fault=st.sampled_from(["", "lose", "damage", "swap", "text", "short", "raise"]),
        num_adapters=st.sampled_from([0, 1, 2]),
    )
    def start(
        self,
        model: dict[str, Any],
        config: dict[str, Any],
        nan: bool,
        step_s: float,
        windows: tuple[int | None, ...],
        spare_slots: int | None,
        run_blocks: int,
        drafts: tuple[float, int | None] | None,
        draft_model: tuple[DraftSpec | None, str] | None,
        tiers: dict[str, Any],
        fault: str,
        num_adapters: int,
    ) -> None:
        self.folder = TemporaryDirectory()
        if not config["enable_prefix_caching"]:
            tiers = {}
        if "kv_disk" in tiers:
            tiers = {**tiers, "kv_disk": self.folder.name}
        config = {**config, **tiers}
        rules = FakeRules(
            VOCAB_SIZE,
            eos_id=EOS,
            eos_rate=30,
            nan_token=NAN if nan else None,
            windows=windows,
            has_states=spare_slots is not None,
        )
        slots = config["max_num_seqs"] + (spare_slots or 0)
        sizes = {**model, "token_s": step_s, "num_state_slots": slots}
        self.store = FakeStore()
        again = partial(Harness, connect=self.store.connect, num_adapters=num_adapters)
        self.again = partial(again, sizes, config, rules, drafts)
        if draft_model is not None and None in windows and model["num_stages"] == 1:
            spec, count = draft_model
            config = {**config, "speculate_tokens": count}
            self.again = partial(again, sizes, config, rules, draft_model=True, draft_spec=spec)
        self.harness = self.again()
        self.load_adapters(self.harness)
        self.store.fault, self.store.only = fault, "get" * (fault != "raise")
        self.harness.core._scheduler.prefixes.run_blocks = run_blocks

    @rule(
        beginning=BEGINNINGS,
        rest=st.lists(TOKENS, min_size=1, max_size=12),
        max_tokens=st.integers(1, 30),
        params=PARAMS,
        fields=FIELDS,
        follow=st.booleans(),
    )
    def add(
        self,
        beginning: list[int],
        rest: list[int],
        max_tokens: int,
        params: dict[str, Any],
        fields: dict[str, Any],
        follow: bool,
    ) -> None:
        prompt, names = beginning + rest, list(self.harness.requests)
        if len(prompt) >= self.harness.core.limits.max_tokens:
            prompt = rest[:2]
        if follow and names:
            leader = self.harness.requests[names[-1]]
            prompt, fields = leader.prompt_ids.tolist(), {**fields, "leader": leader.request_id}
        if not self.harness.num_adapters:
            fields = {**fields, "adapter": ""}
        self.harness.add(prompt, max_tokens, params=params, **fields)

    @rule(name=st.sampled_from(["x", "y", "z"]), shift=st.integers(1, 3))
    def replace_adapter(self, name: str, shift: int) -> None:
        """Requests in flight keep the one that they began with."""
        if self.harness.num_adapters:
            self.harness.core.adapters.remove(name)
            self.harness.load_adapter(name, 1000 * shift)

    def load_adapters(self, harness: Harness) -> None:
        for shift, name in enumerate("xyz" if harness.num_adapters else "", start=1):
            harness.load_adapter(name, 1000 * shift)

    @rule(index=st.integers(0, 50))
    def abort(self, index: int) -> None:
        names = list(self.harness.requests)
        if names:
            self.harness.abort(names[index % len(names)])

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @rule(ahead=st.integers(0, 3), at_launch=st.booleans())
    def fault(self, ahead: int, at_launch: bool) -> None:
        self.harness.order_fault(ahead, at_launch=at_launch)

    @rule()
    def write_idle(self) -> None:
        self.harness.core.write_idle()

    @rule(client=st.sampled_from(["", "a"]), session_id=st.sampled_from(["one", "two"]))
    def end_session(self, client: str, session_id: str) -> None:
        self.harness.core.end_session(client, session_id)

    @rule()
    def reset(self) -> None:
        running = self.harness.core.stats().num_running
        assert self.harness.core.reset_prefix_cache() == (running == 0)

    @invariant()
    def blocks(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check_blocks()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        self.harness.check_outputs()
        self.harness.check_idle()
        self.harness.core.close()
        if self.harness.core._scheduler.tiers is not None:  # the next process finds them
            self.next_process()
        self.folder.cleanup()

    def next_process(self) -> None:
        """Sends the last requests again to a new engine over the same folder."""
        again = self.again()
        for request in list(self.harness.requests.values())[-4:]:
            prompt, name = request.prompt_ids.tolist(), request.request_id
            again.add(prompt, request.max_tokens, name=name, cache_salt=request.cache_salt)
        again.run()
        again.check_outputs()
        again.check_idle()
        again.core.close()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)
