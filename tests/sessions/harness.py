"""What the contract suite needs of a store under test: the store, and a way to let time pass."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.sessions.store import SessionStore


class ManualClock:
    """A clock that moves only when told."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """A started store with `ttl_s` = 100 and room for at least 50 sessions.

    `settle` waits until all that the store does in the background is done; `advance` lets seconds pass,
    for the store and for its server.
    """

    store: SessionStore
    settle: Callable[[], Awaitable[None]]
    advance: Callable[[float], Awaitable[None]]


TTL_S = 100.0
