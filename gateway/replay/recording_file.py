"""Where a recording goes: lines appended to a file.

Invariant: a disk that fails ends the recording and costs no request; a recording with a hole could not be
played back, so nothing follows the first failure.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import BinaryIO

from gateway.observability.logs import log_event


class RecordingFile:
    """Appends. Raises OSError when the file cannot be opened, never later."""

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
        """Idempotent."""
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
