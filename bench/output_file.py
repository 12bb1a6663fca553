"""Files that figures go to: their folders are made before the first measurement."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """A path for `argparse`, whose folder is there afterwards. Raises ArgumentTypeError for one
    that no file can be written to."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {error.strerror}") from None
    return path
