"""Sizes of captured steps, and numbers of rows for which cuBLASLt algorithms are
measured."""

from __future__ import annotations

from bisect import bisect_left

SMALL = (1, 2, 4, 8)
STEP = 8
DENSE_UP_TO = 256
LARGE = (512,)


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8 to 256, then 512, as far as `max_rows` goes; the greatest serves
    exactly `max_rows` where that lies between. Ascending."""
    sizes = [*SMALL, *range(2 * STEP, DENSE_UP_TO + 1, STEP), *LARGE]
    greatest = min(max_rows, LARGE[-1])
    return (*(size for size in sizes if size < greatest), greatest) if greatest > 0 else ()


def mixed_sizes(max_tokens: int) -> tuple[int, ...]:
    """Tokens of captured steps with prompts or drafts, ascending: every second batch size up to
    256, because graphs take memory; larger steps take longer than their launches."""
    return bucket_sizes(min(max_tokens, DENSE_UP_TO))[1::2]


def bucket_of(rows: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest bucket that holds so many rows; None when there is none."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None


def measured_rows(rows: int) -> int:
    """The next power of two, or three quarters of it. All numbers of rows up to it, from the one
    before on, are multiplied by the algorithm that is best for it: its tiles cover them too."""
    power = 1 << (rows - 1).bit_length()
    return power // 4 * 3 if rows <= power // 4 * 3 else power
