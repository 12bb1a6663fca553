"""The times of one request, for its answer."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from vllmx_server.config import ServerConfig
from vllmx_server.generating.generation import Generation
from vllmx_server.generating.usage_answer import RequestTimings


def request_timings(config: ServerConfig, generation: Generation) -> RequestTimings | UnsetType:
    """The times of a request with one prompt and one choice; UNSET for others, as in vLLM, and
    without `--enable-per-request-metrics`."""
    if not config.enable_per_request_metrics or len(generation.requests) != 1:
        return UNSET
    ((request, times),) = generation.requests
    if len(request.core) != 1:
        return UNSET
    found = RequestTimings()
    if times is None or times.first_token_s is None or times.last_token_s is None:
        return found
    count = generation.usage.completion_tokens
    scheduled_s = min(times.arrival_s + times.queue_s, times.first_token_s)
    generating_s = times.last_token_s - times.first_token_s
    found.queue_time_ms = times.queue_s * 1000
    found.time_to_first_token_ms = (times.first_token_s - scheduled_s) * 1000
    found.generation_time_ms = generating_s * 1000
    if count > 1:
        found.mean_itl_ms = generating_s * 1000 / (count - 1)
    if times.last_token_s > scheduled_s:
        found.tokens_per_second = count / (times.last_token_s - scheduled_s)
    return found
