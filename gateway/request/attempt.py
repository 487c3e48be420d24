"""One attempt at one backend: the backend's callbacks, told to the proxy, and its body, passed to the client.

Invariant: after its end (answered, failed, given up) an attempt calls nobody. An exception of our own ends
the turn and nothing else: it must not reach the connection, which may be serving the next request already.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from gateway.errors import UpstreamError
from gateway.upstream.answer import UpstreamAnswer

if TYPE_CHECKING:
    from gateway.downstream.relay import ClientRelay
    from gateway.request.answer_observer import AnswerObserver
    from gateway.request.turn import Turn
    from gateway.upstream.pool import UpstreamPool
    from gateway.wire.asked_usage import UsageFilter


class AttemptOwner(Protocol):
    """The proxy, as an attempt sees it."""

    def on_head(self, turn: Turn, attempt: Attempt) -> None:
        """The backend's head is here."""

    def on_held(self, turn: Turn, attempt: Attempt, is_last: bool) -> None:
        """More of the answer is in `held`: begin it, go on waiting, or try another backend."""

    def on_complete(self, turn: Turn) -> None:
        """The last byte has been passed on."""

    def on_failure(self, turn: Turn, attempt: Attempt, error: UpstreamError) -> None:
        """The backend's answer ends here, incomplete."""

    def on_fault(self, turn: Turn, error: Exception) -> None:
        """Something of our own failed in a callback."""


class Attempt(UpstreamAnswer):
    """Made by `Proxy._prepare`; `turn` is None when it is over."""

    __slots__ = (
        "_owner",
        "held",
        "is_event_stream",
        "observer",
        "pool",
        "relay",
        "request_head",
        "turn",
        "usage_filter",
    )

    def __init__(self, owner: AttemptOwner, turn: Turn) -> None:
        super().__init__()
        self._owner = owner
        self.turn: Turn | None = turn
        self.pool: UpstreamPool | None = None  # of its backend, once it is prepared
        self.request_head = b""  # as sent; kept until the answer begins, to send it again
        self.is_event_stream = False
        self.observer: AnswerObserver | None = None  # of a good answer
        self.usage_filter: UsageFilter | None = None  # where the gateway has asked for more than the client
        self.held: list[bytes] = []  # of the body, until the answer begins
        self.relay: ClientRelay | None = None  # once it has begun

    def abort(self) -> None:
        self.turn = self.relay = None  # they know us: leave no cycle to the collector
        super().abort()

    def begin(self, relay: ClientRelay, *, is_last: bool) -> None:
        """Pass on what has come, and from now on what comes."""
        self.relay = relay
        data = b"".join(self.held)
        self.held.clear()
        self._pass_on(relay, data, is_last)

    def on_head(self) -> None:
        turn = self.turn
        if turn is not None:
            try:
                self._owner.on_head(turn, self)
            except Exception as error:
                self._owner.on_fault(turn, error)

    def on_data(self, data: bytes, is_last: bool) -> None:
        turn = self.turn
        if turn is None:
            return
        try:
            if data and self.observer is not None:
                self._observe(self.observer, data)
            if self.usage_filter is not None:
                data = self.usage_filter.feed(data, is_last)
            if self.relay is not None:
                self._pass_on(self.relay, data, is_last)
            else:
                self.held.append(data)
                self._owner.on_held(turn, self, is_last)
        except Exception as error:
            self._owner.on_fault(turn, error)

    def on_failure(self, error: UpstreamError) -> None:
        turn = self.turn
        if turn is not None:
            try:
                self._owner.on_failure(turn, self, error)
            except Exception as fault:
                self._owner.on_fault(turn, fault)

    def _pass_on(self, relay: ClientRelay, data: bytes, is_last: bool) -> None:
        turn = self.turn
        relay.on_data(data, is_last)
        if is_last and turn is not None:
            self.turn = None
            self._owner.on_complete(turn)

    def _observe(self, observer: AnswerObserver, data: bytes) -> None:
        try:
            observer.feed(data)
        except Exception:  # it must not cost the client its answer
            logging.getLogger(__name__).exception("answer_observer_failed")
            self.observer = None
