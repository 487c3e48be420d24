"""A transport that goes nowhere: records what was written and what was asked of it."""

from __future__ import annotations

import asyncio


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.unsent_bytes = 0
        self.is_reading_now = True
        self.was_aborted = False
        self.was_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.was_closed or self.was_aborted

    def close(self) -> None:
        self.was_closed = True

    def abort(self) -> None:
        self.was_aborted = True

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def pause_reading(self) -> None:
        self.is_reading_now = False

    def resume_reading(self) -> None:
        self.is_reading_now = True
