"""Writes log lines to a descriptor without ever blocking the event loop on a slow reader.

A pipe that nobody reads is full after a few hundred lines, and the next write then blocks. So lines go
through a bounded queue to a thread, which may block. Putting a line costs about a microsecond, a third of a
write to a pipe. The thread waits a moment after it wakes, so that a busy gateway wakes it fifty times a
second and not once per request. The cost: a process that is killed loses the lines of its last moment.

Invariants: lines are written whole and in order. Lines that do not fit into the queue are dropped and
counted, and a line reports them once the queue has been written. Several processes may share the descriptor:
each write is small enough that the kernel does not interleave it with others.

Knows nothing of the lines' contents.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable
from typing import Self

STDERR = 2  # the descriptor, because `sys.stderr` buffers and may have been replaced
MAX_LINES = 10_000
"""Most lines in the queue, about 5 MB: two seconds of a busy gateway."""
LINGER_S = 0.02
FLUSH_TIMEOUT_S = 2.0
"""How long the process waits at its end for the last lines to be read."""
WHOLE_BYTES = select.PIPE_BUF  # what POSIX guarantees to write to a pipe atomically


class LogWriter:
    """A context manager that owns one thread while it is entered."""

    def __init__(
        self,
        descriptor: int = STDERR,
        *,
        make_lost_line: Callable[[int], bytes],
        max_lines: int = MAX_LINES,
    ) -> None:
        """`make_lost_line` makes the line that reports how many were lost."""
        self._descriptor, self._make_lost_line, self._max_lines = descriptor, make_lost_line, max_lines
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._counting = threading.Lock()
        self.num_lost = 0
        self._num_reported = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Write what is queued, as far as possible within `timeout_s`. Idempotent."""
        self._is_closing.set()
        self._queue.put(b"")
        self._thread.join(timeout_s)

    def put(self, line: bytes) -> None:
        """Queue this line, or count it as lost. Never blocks; thread-safe."""
        if self._queue.qsize() < self._max_lines:
            self._queue.put(line)
        else:
            self._lose(1)

    def _lose(self, num_lines: int) -> None:
        with self._counting:
            self.num_lost += num_lines

    # -- in the thread

    def _run(self) -> None:
        while not (self._is_closing.is_set() and self._queue.empty()):
            first = self._queue.get()
            self._is_closing.wait(LINGER_S)
            self._write_waiting(first)
            if self.num_lost > self._num_reported:
                num_lost = self.num_lost - self._num_reported
                self._num_reported += num_lost
                self._write(self._make_lost_line(num_lost))

    def _write_waiting(self, first: bytes) -> None:
        """Write this line and all queued ones, in pieces that are written atomically."""
        piece, num_bytes = [first], len(first)
        with contextlib.suppress(queue.Empty):
            while True:
                line = self._queue.get_nowait()
                if num_bytes + len(line) > WHOLE_BYTES:
                    self._write(b"".join(piece))
                    piece, num_bytes = [], 0
                piece.append(line)
                num_bytes += len(line)
        self._write(b"".join(piece))

    def _write(self, lines: bytes) -> None:
        """Block until they are written. If the reader has gone or the disk is full they are lost."""
        rest = memoryview(lines)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process that shares the descriptor made it non-blocking
                self._wait_writable()
            except OSError:
                self._lose(lines.count(b"\n"))
                return

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        poll.poll()
