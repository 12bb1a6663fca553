"""What the page does most, in Firefox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .browser import running_firefox
from .test_web_chats import (  # noqa: F401 - collected here with this file's browser
    test_files_of_text,
    test_formulas_are_drawn,
    test_search_presets_and_markdown,
    test_texts_of_pdf_files,
)
from .test_web_page import (  # noqa: F401
    test_an_answer_streams_and_is_kept,
    test_branches,
    test_keys_colours_and_a_narrow_screen,
    test_stop_then_go_on,
    test_thoughts_calls_and_their_results,
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_firefox() as running:
        yield running
