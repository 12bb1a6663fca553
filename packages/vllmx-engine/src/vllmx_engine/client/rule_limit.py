"""How much a call may say about which tokens its answers have: every prompt of it is sent with its
own copy, which is checked, tokenised and held by the core."""

from __future__ import annotations

from vllmx_core.errors import InvalidRequestError
from vllmx_core.sampling import SamplingParams

MAX_CALL_RULES = 1 << 21
"""The most rules over all prompts of a call: four with the longest `allowed_token_ids`, eight with
as much in `bad_words`, and any number with what is usual."""


def check_rules(params: SamplingParams, num_prompts: int) -> None:
    """Raises InvalidRequestError where the ids and characters of all prompts' rules are more than
    `MAX_CALL_RULES`."""
    sizes = {
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "bad_words": sum(map(len, params.bad_words)),
        "logit_bias": len(params.logit_bias),
        "stop": sum(map(len, params.stop)),
        "stop_token_ids": len(params.stop_token_ids),
    }
    total = num_prompts * sum(sizes.values())
    if total > MAX_CALL_RULES:
        longest = max(sizes, key=lambda name: sizes[name])
        raise InvalidRequestError(
            f"the call has {num_prompts} prompts with {sum(sizes.values())} ids and characters each"
            f" in {', '.join(name for name in sizes if sizes[name])}, at most {MAX_CALL_RULES} in"
            f" all are served: shorten {longest}, or split the call",
            param=longest,
        )
