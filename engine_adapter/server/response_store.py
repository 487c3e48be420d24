"""The answers of `/v1/responses` that a later request may continue, read or delete.

Decides what is kept: the finished object and the conversation up to it, the least recently used going
first. It lives in memory, so a follow-up must come to the worker that answered (the gateway sees to that)
and a restart forgets: an unknown id is then a clear 404, never a silently shorter context.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine_adapter.server.protocol import ChatMessage

DEFAULT_CAPACITY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One answer and the messages that led to it, its own included; instructions are not inherited."""

    document: dict[str, object]
    messages: tuple[ChatMessage, ...]


class ResponseStore:
    """Bounded in number; each entry is bounded by the context and the body limit."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, response_id: str, entry: StoredResponse) -> None:
        """Keep an answer. Changes: may drop the least recently used one."""
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
        """Forget an answer; False if it was unknown."""
        return self._entries.pop(response_id, None) is not None
