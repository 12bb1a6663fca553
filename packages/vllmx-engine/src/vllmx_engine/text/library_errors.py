"""What the `tokenizers` library throws, as errors of ours: it raises plain `Exception`, and where
it runs into a bug of its own a panic, which is a `BaseException`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllmx_core.errors import VllmxError, excerpt


@contextmanager
def library_errors(make: Callable[[str], VllmxError]) -> Iterator[None]:
    """Turns errors of the library into ours; it is put around its calls and nothing else. `make`
    gets the reason, one short line. Errors of ours pass."""
    try:
        yield
    except VllmxError:
        raise
    except Exception as error:
        raise make(_reason(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise make(_reason(error)) from error


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    line = excerpt(lines[0].removeprefix("Cannot instantiate Tokenizer from buffer: "))
    # It may quote a token of a damaged file, and is shown in terminals.
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in line
    )
