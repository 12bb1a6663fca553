"""The parts of a streamed chunk that do not change, encoded once."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vllmx_server.generating.generation import Usage
from vllmx_server.generating.sampling import StreamOptions
from vllmx_server.generating.usage_answer import RequestTimings
from vllmx_server.schema.json_pieces import json_pieces

encode = msgspec.json.Encoder().encode


class Chunks:
    """Frames choices as the server-sent events of one answer.

    With `include_usage` a last chunk has the usage and no choices, and the others say
    `"usage": null`, as OpenAI's do; with `continuous_usage_stats` each has the usage so far.

    Args:
        fingerprint: of what serves (`Served.fingerprint`).
    """

    def __init__(
        self,
        kind: str,
        answer_id: str,
        created: int,
        model: str,
        options: StreamOptions | None,
        fingerprint: str,
    ) -> None:
        fixed = {
            "id": answer_id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self.head = b"data: " + encode(fixed)[:-1] + b',"choices":['
        self.has_last_usage = options is not None and options.has_usage
        self.has_usage = self.has_last_usage and bool(options and options.continuous_usage_stats)
        self.tail = b'],"usage":null}\n\n' if self.has_last_usage else b"]}\n\n"

    def chunk(
        self, choice: dict[str, Any], usage: Usage, num_unsent: int = 0, **extra: Any
    ) -> bytes:
        """One choice, and fields beside it. `num_unsent`: tokens in `usage` that the client gets
        with later chunks."""
        more = b"".join(b",%b:%b" % (encode(name), encode(extra[name])) for name in extra)
        encoded = b"".join(json_pieces(choice))
        return self.head + encoded + self._end(usage, num_unsent, more)

    def usage(self, usage: Usage, timings: RequestTimings | UnsetType) -> bytes:
        """The last chunk of `include_usage`, with the times of the request if they are wanted."""
        more = b"" if timings is UNSET else b',"metrics":' + encode(timings)
        return self.head + b'],"usage":%b%b}\n\n' % (encode(usage.shown()), more)

    def _end(self, usage: Usage, num_unsent: int, more: bytes) -> bytes:
        if self.has_usage:
            return b'],"usage":%b%b}\n\n' % (encode(usage.shown(num_unsent)), more)
        return b"]" + more + self.tail[1:]
