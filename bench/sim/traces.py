"""Arrivals of requests at a service: chats, agents' programs and batches.

Shapes follow public descriptions of such traffic: few system prompts serve most chats, a chat's
prompt is its own history, an agent calls again as soon as a tool has answered.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

BLOCK_TOKENS = 16


@dataclass(slots=True, eq=False)
class Request:
    """A request of a trace.

    Attributes:
        digests: of the full blocks of the prompt, and of the answer behind it.
        num_blocks: full blocks of the prompt.
    """

    at_s: float
    digests: Sequence[bytes]
    num_blocks: int
    num_tokens: int
    num_output: int
    session: str


@cache
def _block(stream: int, index: int) -> bytes:
    """The digest of a block of a stream of tokens."""
    return struct.pack("<qq", stream, index)


def _digests(shared: int, num_shared: int, own: int, num_tokens: int) -> list[bytes]:
    """Blocks of a prompt that begins with `num_shared` tokens that others have too."""
    first = num_shared // BLOCK_TOKENS
    last = num_tokens // BLOCK_TOKENS
    return [_block(shared if at < first else own, at) for at in range(last)]


@dataclass(frozen=True)
class Shape:
    """The shape of a trace; tokens and seconds are means of exponential distributions.

    Attributes:
        turns: requests of a session.
        num_prompts: shared prompts, the most frequent first.
        shared: tokens of each.
        asked, answered: tokens that a turn adds.
        pause_s: seconds between an answer and the next turn.
    """

    turns: int
    num_prompts: int
    shared: int
    asked: int
    answered: int
    pause_s: float
    is_session: bool = True


SHAPES = {
    "chat": Shape(turns=6, num_prompts=40, shared=1500, asked=200, answered=220, pause_s=12.0),
    "agents": Shape(turns=12, num_prompts=12, shared=3000, asked=500, answered=90, pause_s=1.0),
    "batch": Shape(1, 4, 600, 300, 150, 0.0, is_session=False),
}


def trace(name: str, rate: float, seconds: float, seed: int = 1) -> list[Request]:
    """Requests in the order of their arrival, `rate` a second on average."""
    shape, draw = SHAPES[name], random.Random(seed)
    # Sessions begin before the trace does, so that its first second is like its last.
    lasts_s = shape.turns * (shape.pause_s + 4.0)
    begins_s, found = -lasts_s, []
    for number in range(1 << 62):
        begins_s += draw.expovariate(rate / shape.turns)
        if begins_s > seconds:
            break
        found += [one for one in _session(shape, draw, number, begins_s) if 0 <= one.at_s < seconds]
    return sorted(found, key=lambda one: one.at_s)


def _session(shape: Shape, draw: random.Random, number: int, at_s: float) -> Iterator[Request]:
    shared = min(int(draw.paretovariate(0.8)), shape.num_prompts) - 1
    name = str(number) if shape.is_session else ""
    length = shape.shared
    for _ in range(shape.turns):
        asked = length + 20 + int(draw.expovariate(1 / shape.asked))
        answer = 8 + int(draw.expovariate(1 / shape.answered))
        length = asked + answer
        digests = _digests(~shared, shape.shared, number, length)
        yield Request(at_s, digests, asked // BLOCK_TOKENS, asked, answer, name)
        at_s += 2.0 + answer * 0.03
        at_s += draw.expovariate(1 / shape.pause_s) if shape.pause_s else 0.0
