"""One attempt at one backend: the backend's callbacks, told to the proxy, and its body, passed to the client.

Invariant: after its end (answered, failed, given up) an attempt calls nobody. An exception of our own ends
the turn and nothing else: it must not reach the connection, which may be serving the next request already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gateway.errors import UpstreamError
from gateway.upstream.answer import UpstreamAnswer

if TYPE_CHECKING:
    from gateway.downstream.relay import ClientRelay
    from gateway.request.turn import Turn
    from gateway.upstream.pool import UpstreamPool


class AttemptOwner(Protocol):
    """The proxy, as an attempt sees it."""

    def on_head(self, turn: Turn, attempt: Attempt) -> None:
        """The backend's head is here: fail over, or begin the answer."""

    def on_complete(self, turn: Turn) -> None:
        """The last byte has been passed on."""

    def on_failure(self, turn: Turn, attempt: Attempt, error: UpstreamError) -> None:
        """The backend's answer ends here, incomplete."""

    def on_fault(self, turn: Turn, error: Exception) -> None:
        """Something of our own failed in a callback."""


class Attempt(UpstreamAnswer):
    """Made by `Proxy._prepare`; `turn` is None when it is over."""

    __slots__ = ("_owner", "pool", "relay", "request_head", "turn")

    def __init__(self, owner: AttemptOwner, turn: Turn) -> None:
        super().__init__()
        self._owner = owner
        self.turn: Turn | None = turn
        self.pool: UpstreamPool | None = None  # of its backend, once it is prepared
        self.relay: ClientRelay | None = None  # once the answer has begun
        self.request_head = b""  # as sent; kept until the head, to send it again on a fresh connection

    def abort(self) -> None:
        self.turn = self.relay = None  # they know us: leave no cycle to the collector
        super().abort()

    def on_head(self) -> None:
        turn = self.turn
        if turn is not None:
            try:
                self._owner.on_head(turn, self)
            except Exception as error:
                self._owner.on_fault(turn, error)

    def on_data(self, data: bytes, is_last: bool) -> None:
        turn, relay = self.turn, self.relay
        if turn is None or relay is None:
            return
        try:
            relay.on_data(data, is_last)
            if is_last:
                self.turn = None
                self._owner.on_complete(turn)
        except Exception as error:
            self._owner.on_fault(turn, error)

    def on_failure(self, error: UpstreamError) -> None:
        turn = self.turn
        if turn is not None:
            try:
                self._owner.on_failure(turn, self, error)
            except Exception as fault:
                self._owner.on_fault(turn, fault)
