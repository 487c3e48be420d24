"""Detects that a file has changed: the configuration or a certificate.

Decision: poll every few seconds instead of subscribing to events. Polling works on every file system, follows
symbolic links (Kubernetes updates a mounted ConfigMap by replacing one), and costs one `stat`. A change
counts only when the file is the same at two polls in a row, so that a file that is still being written is not
read. A deleted file is not a change: what was read from it stays in force.

Knows nothing of the files' contents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

Mark = tuple[int, int, int]


class ReloadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a changed configuration is applied without a restart."""

    watch: bool = False
    """Whether to reload the configuration file automatically when it changes. SIGHUP always reloads it, and
    changed certificates are always picked up."""
    interval_s: float = 2.0
    """Interval between checks of the files. A change is applied when a second check finds the same state."""

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise ValueError("interval_s must be greater than 0")


def mark_of(path: Path) -> Mark | None:
    """Return what identifies a file's content: time, inode and size. None: no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


class ChangedFiles:
    """Compares the files with how they were at earlier polls."""

    def __init__(self) -> None:
        self._known: dict[Path, Mark | None] = {}
        self._seen: dict[Path, Mark | None] = {}

    def look(self, paths: Iterable[Path]) -> bool:
        """Return whether any of these files has changed and settled, and remember them. A file that is new to
        this object has not changed."""
        has_changed = False
        for path in paths:
            mark = mark_of(path)
            known = self._known.setdefault(path, mark)
            if mark is not None and mark != known and mark == self._seen.get(path):
                self._known[path] = mark
                has_changed = True
            self._seen[path] = mark
        return has_changed


class FileWatch:
    """Polls the files of `paths()` every `interval_s()` and calls `on_change`. Owns one task."""

    def __init__(
        self,
        paths: Callable[[], Iterable[Path]],
        on_change: Callable[[], Awaitable[object]],
        *,
        interval_s: Callable[[], float],
    ) -> None:
        self._paths, self._on_change, self._interval_s = paths, on_change, interval_s
        self._files = ChangedFiles()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        """Poll forever; a failed round does not end the task."""
        while True:
            try:
                if await asyncio.to_thread(self._files.look, tuple(self._paths())):
                    await self._on_change()
            except Exception:
                logging.getLogger(__name__).exception("file watch")
            await asyncio.sleep(self._interval_s())
