"""What may stand in front of an answer's form: the thoughts of the model."""

from __future__ import annotations

from collections.abc import Sequence

from vllmx_core.output_format import OutputFormat

from vllmx_engine.client.chat_options import ChatOptions
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.grammars import FreePart


def free_part(
    made_of: OutputFormat,
    prompt: str,
    options: ChatOptions,
    tokenizer: Tokenizer,
    eos_ids: Sequence[int],
    *,
    thinks: bool,
) -> FreePart | None:
    """What the answer to a prompt has in front of its form; None where it has nothing.

    A prompt may end within thoughts, of which the form is the end. Behind any other, the model may
    begin some where that was asked for: a mask that lets them through brings those models to think
    that have never learnt to, for both beginnings are equally unlikely to them.
    """
    marker, held = tokenizer.marker, tuple(eos_ids)
    channels, thinking = made_of.channels, made_of.thinking
    if channels is not None and not options.continue_final_message:
        header = channels.channel + channels.content
        ends = (
            marker(header + channels.message),
            marker(f"{header} {channels.constrain}json{channels.message}"),
        )
        # a call of a tool is an answer, too
        return FreePart(ends, marker(channels.channel), () if options.tools else held)
    if made_of.opened and prompt.rstrip().endswith(made_of.opened.strip()):
        header = made_of.content_begin.removeprefix(made_of.opened)
        return FreePart((marker(header),), (), () if options.tools else held)
    if thinking is None or not thinking.begin.strip():
        return None
    begin, end = thinking.begin.strip(), thinking.end.strip()
    if prompt.rstrip().endswith(begin):
        return FreePart((marker(end),), held_ids=held)
    if options.continue_final_message or not thinks or prompt.rstrip().endswith(end):
        return None
    return FreePart((marker(end),), marker(made_of.thinking_begin.strip()), held)
