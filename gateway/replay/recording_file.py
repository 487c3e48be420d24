"""Appends the lines of a recording to a file.

Invariant: a disk that fails ends the recording and fails no request. Nothing is written after the first
failure, because a recording with a gap cannot be replayed.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import BinaryIO

from gateway.observability.logs import log_event


class RecordingFile:
    """An open file. Raises OSError if it cannot be opened, and never later."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO | None = path.open("ab")

    def write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file. Safe to call again."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log_event("recording_ended", level=logging.ERROR, reason=error.strerror)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
