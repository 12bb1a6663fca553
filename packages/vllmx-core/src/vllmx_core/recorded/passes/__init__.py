"""Passes: functions from a recorded step to a recorded step, run before a backend lowers it.

A pass knows no device and a backend knows none of what passes stand for; each is a module here with
tests of its own. They run in this order, and each kind has its place:

1. *What the model is*: sharding puts an all-reduce behind each linear whose weight is cut along its
   input features and gives attention its share of the heads; an adapter puts an op behind each
   linear that it changes; a tap copies values out. They go to `record(..., passes=...)`, so that
   `supports` is asked for what they put in.
2. *What the backend lacks*: `expand_unsupported` replaces ops by those that they expand into.
   `vllmx_core.recorded.recording.prepare` runs it for every backend.
3. *What is faster*: fusions, such as `fuse_gated_linears`. A backend runs those that it has the
   ops for.
"""

from __future__ import annotations

from collections.abc import Callable

from vllmx_core.ops.op import OpList

Pass = Callable[[OpList], OpList]
