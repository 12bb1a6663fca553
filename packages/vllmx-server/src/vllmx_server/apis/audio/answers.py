"""The shapes of transcriptions: JSON, subtitles, events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vllmx_engine.speech.transcriber import Segment, Transcription

from vllmx_server.schema.record import Record


class DurationUsage(Record, kw_only=True):
    """The cost of a transcription."""

    type: Literal["duration"] = "duration"
    seconds: float


class PlainTranscription(Record, kw_only=True):
    """The text alone."""

    text: str
    usage: DurationUsage


class SpokenSegment(Record, kw_only=True):
    """A part of an audio; times in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float


class VerboseTranscription(Record, kw_only=True):
    """The text and its parts."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[SpokenSegment]
    usage: DurationUsage


class TranscriptDelta(Record, kw_only=True, tag_field="type", tag="transcript.text.delta"):
    """More of the text."""

    delta: str


class TranscriptDone(Record, kw_only=True, tag_field="type", tag="transcript.text.done"):
    """The whole text."""

    text: str
    usage: DurationUsage


def verbose(found: Transcription, *, translates: bool) -> VerboseTranscription:
    """The answer with all that is known."""
    segments = [
        SpokenSegment(
            id=number,
            seek=round(each.start * 100),
            start=each.start,
            end=each.end,
            text=each.text,
            tokens=each.tokens,
            temperature=each.temperature,
            avg_logprob=each.avg_logprob,
            compression_ratio=each.compression_ratio,
        )
        for number, each in enumerate(found.segments)
    ]
    return VerboseTranscription(
        task="translate" if translates else "transcribe",
        language=found.language,
        duration=found.duration,
        text=found.text,
        segments=segments,
        usage=DurationUsage(seconds=found.duration),
    )


def subtitles(segments: Sequence[Segment], kind: str) -> str:
    """The segments as SubRip ("srt") or WebVTT ("vtt")."""
    comma = "," if kind == "srt" else "."
    lines = [] if kind == "srt" else ["WEBVTT", ""]
    for number, each in enumerate(segments, 1):
        if kind == "srt":
            lines.append(str(number))
        lines.append(f"{_clock(each.start, comma)} --> {_clock(each.end, comma)}")
        text = each.text.strip().replace("-->", "->")
        lines += " ".join(text.split("\n")), ""
    return "\n".join(lines) + "\n"


def _clock(seconds: float, comma: str) -> str:
    minutes, millis = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{millis // 1000:02}{comma}{millis % 1000:03}"
