"""What is measured. Standard library only: workers in other virtual environments import this."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS_SINGLE = 64
STEPS_BATCHED = 16


@dataclass(frozen=True)
class Case:
    """One figure: the speed of a prefill, or of decoding `batch` rows around `context` tokens."""

    kind: str
    """`prefill`: one sequence of `context` tokens, until its first token. `decode`: see below."""
    batch: int
    context: int
    """The context length; for decode the mean one over the timed steps."""

    @property
    def label(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.context}"
        return f"decode b{self.batch} ctx {self.context}"

    @property
    def num_steps(self) -> int:
        """Timed decode steps; few, so that the context hardly grows while they run."""
        return STEPS_SINGLE if self.batch == 1 else STEPS_BATCHED

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of each row before the first timed step."""
        if self.kind == "prefill":
            return self.context
        return self.context - self.num_steps // 2


def make_cases(
    prefills: Iterable[int], batches: Iterable[int], contexts: Iterable[int]
) -> list[Case]:
    """Every prefill, then every batch at every context. ValueError if a context is too short."""
    cases = [Case("prefill", 1, length) for length in prefills]
    batches = list(batches)
    cases += [Case("decode", batch, context) for context in contexts for batch in batches]
    for case in cases:
        if case.batch < 1 or case.num_prompt_tokens < 1:
            shortest = STEPS_SINGLE // 2 + 1
            raise ValueError(
                f"{case.label} cannot be measured: batches start at 1, contexts of decode at"
                f" {shortest}, prefills at 1"
            )
    return cases


@dataclass(frozen=True)
class Job:
    """What one worker process has to measure."""

    model: str
    """Folder with config.json and model.safetensors, or a GGUF file."""
    gguf: str
    """GGUF file with the same weights, for engines that read nothing else."""
    cases: tuple[Case, ...]
    threads: int
    busy_pid: int | None
    """Process that keeps a core busy on purpose; its CPU time does not count as foreign."""
    quiet_wait_s: float
    """The most seconds to wait before a sample for the other work on the machine to pause."""
    out: str = ""
    """File to which a worker appends its samples, one JSON object a line."""
    ranks: int = 1
    """Processes among which an engine divides the model, with a core each."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Job:
        fields: dict[str, Any] = json.loads(path.read_text())
        cases = tuple(Case(**case) for case in fields.pop("cases"))
        return Job(cases=cases, **fields)


@dataclass(frozen=True)
class Sample:
    """One measurement of a case."""

    case: str
    tokens_per_s: float
    foreign_cores: float | None
    """CPU time per second that processes outside the measurement took meanwhile; None: unknown."""
    variant: str = ""
    """Setting of the engine under which it was measured; the best one counts."""
