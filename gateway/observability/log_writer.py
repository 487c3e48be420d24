"""Writes log lines to a descriptor, without ever keeping the event loop waiting for who reads them.

A pipe whose reader has fallen asleep is full after some hundred lines, and the next write then waits for
ever. So lines go through a bounded queue to a thread, which may wait. Whoever puts a line pays about a
microsecond, a third of what a write to a pipe costs; the thread lingers a moment after it has woken, so that
a busy gateway wakes it fifty times a second and not once per request. The price: a process that is killed
loses the lines of its last moment.

Invariants: lines are written whole and in the order they were put. What does not fit into the queue is lost,
counted, and told in a line of its own once the queue has been written. Several processes may share the
descriptor: each write is small enough for the kernel not to mix it with another's.

Knows nothing of what is in a line.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable
from typing import Self

STDERR = 2  # the descriptor: `sys.stderr` buffers, and may be somebody else's object
MAX_LINES = 10_000
"""How many lines wait at most, some 5 MB: two seconds of a busy gateway."""
LINGER_S = 0.02
FLUSH_TIMEOUT_S = 2.0
"""How long the end of the process may wait for its last lines to be read."""
WHOLE_BYTES = select.PIPE_BUF  # what POSIX promises to write to a pipe in one piece


class LogWriter:
    """Owns one thread, from entering it as a context until leaving it."""

    def __init__(
        self,
        descriptor: int = STDERR,
        *,
        tell_lost: Callable[[int], bytes],
        max_lines: int = MAX_LINES,
    ) -> None:
        """`tell_lost` makes the line that tells how many were lost."""
        self._descriptor, self._tell_lost, self._max_lines = descriptor, tell_lost, max_lines
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._counting = threading.Lock()
        self.num_lost = 0
        self._num_told = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Write what waits, as far as its reader takes it within `timeout_s`. Idempotent."""
        self._is_closing.set()
        self._queue.put(b"")
        self._thread.join(timeout_s)

    def put(self, line: bytes) -> None:
        """Have this line written, or count it as lost. Never waits; may be called from any thread."""
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
            if self.num_lost > self._num_told:
                num_lost = self.num_lost - self._num_told
                self._num_told += num_lost
                self._write(self._tell_lost(num_lost))

    def _write_waiting(self, first: bytes) -> None:
        """Write this line and all that wait behind it, in pieces that stay whole."""
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
        """Wait until they are taken. A reader that has gone, or a full disk, loses them."""
        rest = memoryview(lines)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # somebody who shares the descriptor made it non-blocking
                self._wait_writable()
            except OSError:
                self._lose(lines.count(b"\n"))
                return

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        poll.poll()
