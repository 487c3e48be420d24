"""Watching an answer while it passes: first token, token usage, response id. Never alters a byte.

A stream is read event by event; a whole JSON answer is kept up to a limit and read at its end, because
usage comes last. What was not seen stays `None`: unknown is not zero.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.values import Api, Usage
from gateway.wire.answers import observe_json
from gateway.wire.sse import SseObserver


class AnswerObserver:
    """Fed with the body of one 2xx answer by the relay; `finish` once at its end."""

    __slots__ = (
        "_json",
        "_on_first_token",
        "_room_bytes",
        "_sse",
        "api",
        "finish_reason",
        "response_id",
        "usage",
    )

    def __init__(
        self, api: Api, *, is_stream: bool, limit_bytes: int, on_first_token: Callable[[], None]
    ) -> None:
        self.api = api
        self._sse = SseObserver(api) if is_stream else None
        self._json: list[bytes] = []
        self._room_bytes = limit_bytes
        self._on_first_token: Callable[[], None] | None = on_first_token
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.response_id: str | None = None

    @property
    def is_mid_event(self) -> bool:
        return self._sse is not None and self._sse.is_mid_event

    @property
    def is_complete(self) -> bool:
        """A stream whose closing event has passed: nothing is missing whatever the connection does."""
        return self._sse is not None and self._sse.is_complete

    def feed(self, data: bytes) -> None:
        sse = self._sse
        if sse is None:
            self._room_bytes -= len(data)
            if self._room_bytes >= 0:
                self._json.append(data)
            return
        sse.feed(data)
        if self._on_first_token is not None and sse.has_first_token:
            self._on_first_token()
            self._on_first_token = None

    def finish(self) -> None:
        """Read what the end of the answer tells. Also after a broken stream: usage so far counts."""
        if self._sse is not None:
            self.usage, self.finish_reason = self._sse.usage, self._sse.finish_reason
            self.response_id = self._sse.response_id
        elif self._room_bytes >= 0:
            self.usage, self.finish_reason, self.response_id = observe_json(self.api, b"".join(self._json))
        self._json.clear()
        self._on_first_token = None  # it knows the turn, which knows us: leave no cycle to the collector
