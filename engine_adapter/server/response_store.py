"""Stores the answers of `/v1/responses`, which later requests may continue, read or delete.

Decides what is kept: the finished object and the conversation up to it; the least recently used are dropped
first. The store is in memory, so a follow-up must reach the worker that answered (the gateway routes it
there), and a restart loses it. An unknown id is a 404, never a silently shorter context.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine_adapter.server.protocol import ChatMessage

DEFAULT_CAPACITY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One answer and its conversation, the answer included; instructions are not inherited."""

    document: dict[str, object]
    messages: tuple[ChatMessage, ...]
    cache_salt: str = ""  # who continues the answer must send the same


class ResponseStore:
    """Bounded in number; each entry is bounded by the context and body limits."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, response_id: str, entry: StoredResponse) -> None:
        """Store an answer. Changes: may drop the least recently used one."""
        self._entries[response_id] = entry
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def get(self, response_id: str) -> StoredResponse | None:
        """Return an answer. Changes: it becomes the most recently used."""
        entry = self._entries.get(response_id)
        if entry is not None:
            self._entries.move_to_end(response_id)
        return entry

    def delete(self, response_id: str) -> bool:
        """Delete an answer; return False if it is unknown."""
        return self._entries.pop(response_id, None) is not None
