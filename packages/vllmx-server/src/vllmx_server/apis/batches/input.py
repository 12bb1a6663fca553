"""The input file of a batch, checked line by line before any is answered."""

from __future__ import annotations

from pathlib import Path

from vllmx_core.errors import InvalidRequestError, excerpt, shown

from vllmx_server.apis.batches.answers import BatchError
from vllmx_server.apis.batches.schema import ENDPOINTS, LINE, BatchLine
from vllmx_server.apis.batches.store import Line
from vllmx_server.schema.decode import decode

MAX_LINES = 50_000
ANY_ENDPOINT = ""
"""The endpoint of a batch whose lines name routes of their own, and which may have any number of
them."""
_MAX_ERRORS = 50
_BOM = b"\xef\xbb\xbf"


class InputReader:
    """Reads requests that all go to one route, or to any of those that batches have.

    Attributes:
        errors: found so far; reading ends at the fiftieth.
        num_lines: that are requests.
    """

    def __init__(self, path: Path, endpoint: str, max_line_bytes: int) -> None:
        self.errors: list[BatchError] = []
        self.num_lines = 0
        self._file = path.open("rb")
        self._endpoints = ENDPOINTS if endpoint == ANY_ENDPOINT else (endpoint,)
        self._max_lines = 1 << 40 if endpoint == ANY_ENDPOINT else MAX_LINES
        self._max_line_bytes = max_line_bytes
        self._ids: set[str] = set()
        self._start = 0
        self._number = 0
        self._has_ended = False

    def read(self, count: int) -> list[Line]:
        """The next lines, about so many; none at the end. For a thread."""
        found: list[Line] = []
        while len(found) < count and len(self.errors) < _MAX_ERRORS and not self._has_ended:
            data = self._file.readline(self._max_line_bytes + 1)
            if not data:
                break
            self._number += 1
            start, self._start = self._start, self._start + len(data)
            if len(data) > self._max_line_bytes:
                self._fault("line_too_long", f"a line has over {self._max_line_bytes} bytes")
                self._has_ended = True
                break
            if self._number > 2 * self._max_lines:
                self._fault("too_many_lines", f"with blank ones over {2 * self._max_lines} lines")
                self._has_ended = True
                break
            if not data.strip() or (self._number == 1 and data.strip() == _BOM):
                continue
            if self._number == 1 and data.startswith(_BOM):
                data, start = data[len(_BOM) :], start + len(_BOM)
            line = self._check(data, start)
            if line is not None:
                found.append(line)
        return found

    def finish(self) -> None:
        """Closes the file; one without lines is wrong too."""
        self._file.close()
        if not self.num_lines and not self.errors:
            self.errors.append(BatchError("empty_file", "the input file has no lines"))

    def _check(self, data: bytes, start: int) -> Line | None:
        try:
            line = read_line(data)
        except InvalidRequestError as error:
            self._fault("invalid_json_line", error.message, error.param)
            return None
        self.num_lines += 1
        if line.url not in self._endpoints:
            wanted = " or ".join(self._endpoints)
            self._fault("mismatched_url", f"the url {shown(line.url)} is not {wanted}", "url")
        elif line.custom_id in self._ids:
            text = f"the custom_id {shown(line.custom_id)} is given twice"
            self._fault("duplicate_custom_id", text, "custom_id")
        elif self.num_lines > self._max_lines:
            self._fault("too_many_lines", f"a batch has at most {self._max_lines} lines")
            self._has_ended = True
        self._ids.add(line.custom_id)
        return Line(self._number, start, len(data), line.custom_id)

    def _fault(self, code: str, message: str, param: str | None = None) -> None:
        """Notes a fault of the line that was read last."""
        self.errors.append(BatchError(code, excerpt(message, 1000), self._number, param))


def read_line(data: bytes) -> BatchLine:
    """Raises InvalidRequestError."""
    line = decode(data, LINE)
    if not bytes(line.body).lstrip().startswith(b"{"):
        raise InvalidRequestError("body: expected an object", param="body")
    return line
