"""Steps in flight: enqueued and not read yet, at most two, or one for each stage of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from vllmx_core.backend import LoadedInfo
from vllmx_core.plan import SamplingRows, StepPlan

MAX_STEPS = 2

Step = TypeVar("Step")


class InFlight(Generic[Step]):
    """The queue of one model. Violations of the contract of `LoadedModel` are AssertionErrors.

    Args:
        info: its limits hold for each step.
        samples: ids are drawn, from a row of parameters for each row of logits.
    """

    __slots__ = (
        "_max_logit_rows",
        "_max_steps",
        "_max_tokens",
        "_samples",
        "_steps",
        "_unsampled",
        "closed",
    )

    def __init__(self, info: LoadedInfo, *, samples: bool = True) -> None:
        self._samples = samples
        self._max_steps = max(MAX_STEPS, info.num_stages)
        self._max_tokens = info.max_num_batched_tokens
        self._max_logit_rows = info.max_logit_rows
        self._steps: deque[Step] = deque()
        self._unsampled: tuple[Step, int] | None = None
        """The newest step and its L, while it waits for `sample`."""
        self.closed = False

    def __len__(self) -> int:
        return len(self._steps)

    def check_room(self, plan: StepPlan) -> None:
        """Asserts, before a step is enqueued, that there is room for it and that it keeps the
        limits."""
        assert not self.closed, "the model is closed"
        assert self._unsampled is None, "the step before waits for sample()"
        assert len(self._steps) < self._max_steps, (
            "a third step in flight: call result() of the first"
        )
        assert 0 < plan.num_tokens <= self._max_tokens, f"T = {plan.num_tokens}"
        assert plan.num_logit_rows <= self._max_logit_rows, f"L = {plan.num_logit_rows}"

    def add(self, step: Step) -> None:
        """A step was enqueued."""
        self._steps.append(step)

    def add_unsampled(self, step: Step, plan: StepPlan) -> None:
        """The forward pass of a step was enqueued."""
        self._steps.append(step)
        self._unsampled = step, plan.num_logit_rows

    @contextmanager
    def sampling(self, step: Step, rows: SamplingRows) -> Iterator[None]:
        """Holds the second part of a step that was added unsampled; where that raises, the step is
        in flight no more."""
        assert not self.closed, "the model is closed"
        assert self._unsampled is not None, "sample() was called twice"
        unsampled, num_logit_rows = self._unsampled
        assert unsampled is step, "sample() was called twice"
        wanted = num_logit_rows if self._samples else 0
        assert rows.num_rows == wanted, f"{rows.num_rows} rows, L = {wanted}"
        self._unsampled = None
        try:
            yield
        except BaseException:
            self._steps.pop()
            raise

    def check_oldest(self, step: Step) -> None:
        """Asserts, before a step is read, that it was sampled, was not read yet, and is the oldest
        in flight."""
        waits = self._unsampled is not None and self._unsampled[0] is step
        assert not waits, "result() before sample()"
        assert self._steps, "result() was called twice"
        assert self._steps[0] is step, "result() out of the order of the steps"

    def remove_oldest(self) -> None:
        """The oldest step was read: what it held on the device may be used again."""
        self._steps.popleft()

    def close(self) -> bool:
        """Forgets all steps; False when the model was closed before."""
        self._steps.clear()
        self._unsampled = None
        was_open, self.closed = not self.closed, True
        return was_open
