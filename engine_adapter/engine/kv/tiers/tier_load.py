"""One load in progress: the chunks that a sequence is still waiting for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine_adapter.engine.kv.sequence import Sequence
from engine_adapter.engine.kv.tiers.chunk_readers import Chunk


@dataclass(slots=True, kw_only=True, eq=False)
class TierLoad:
    """One sequence's load. The sequence holds its id for as long as it wants it."""

    load_id: int
    sequence: Sequence
    chunks: deque[Chunk]  # not installed yet, in order
    waiting_since_s: float

    @property
    def is_wanted(self) -> bool:
        """False once the sequence has lost its blocks or started another load."""
        return self.sequence.load_id == self.load_id
