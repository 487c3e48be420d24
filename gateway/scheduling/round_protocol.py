"""A socket whose bytes are read in rounds. What is called for them, and when, is the deriving class's."""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.scheduling.rounds import Rounds, Stage

LARGE_READ_BYTES: Final = 65_536
"""So many bytes are worth a step of their own: they wait for no round, and are not kept beside others'."""


class RoundProtocol(asyncio.Protocol):
    """Bytes that arrive are handed to `read` in their stage of the round.

    Before anything else of the connection is looked at (its end, a deadline) the deriving class calls
    `read_arrived`, so that what came first is read first.
    """

    __slots__ = ("_stage", "arrived", "rounds")

    def __init__(self, rounds: Rounds, stage: Stage) -> None:
        self.rounds, self._stage = rounds, stage
        self.arrived = b""  # not read yet

    def data_received(self, data: bytes) -> None:
        if not self.arrived:
            self.arrived = data
            self.rounds.add(self._stage, self.read_arrived)
        else:
            self.arrived += data
        if len(data) >= LARGE_READ_BYTES:
            self.read_arrived()

    def read_arrived(self) -> None:
        """Read what has arrived, if that has not happened yet."""
        data, self.arrived = self.arrived, b""
        if not data:
            return
        try:
            self.read(data)
        except Exception:
            self.abort()
            raise

    def read(self, data: bytes) -> None:
        """Take the next bytes."""
        raise NotImplementedError

    def abort(self) -> None:
        """Cut the connection off: it cannot go on after a fault of our own."""
        raise NotImplementedError
