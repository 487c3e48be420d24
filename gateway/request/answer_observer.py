"""Watching an answer while it passes: first token, token usage, response id. Never alters a byte.

Only the first token is urgent. Until it has come each event of a stream is read as it passes; the events
behind it are read in batches, which costs a fifth, and whatever is asked of this object reads the rest first.
A whole JSON answer is kept up to a limit and read at its end, because usage comes last. What was not seen
stays `None`: unknown is not zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.values import Api, Usage
from gateway.wire.answers import error_in_json, id_at_head, observe_json
from gateway.wire.bodies import is_background
from gateway.wire.sse import SseObserver
from gateway.wire.usage import UNSEEN_TOKENS, plausible

BATCH_BYTES: Final = 2_048
"""About ten events of one token; an open stream holds half of it on average."""


class AnswerObserver:
    """Fed with the body of one 2xx answer by the relay; `finish` once at its end."""

    __slots__ = (
        "_max_prompt_tokens",
        "_on_first_token",
        "_room_bytes",
        "_sse",
        "_unread",
        "api",
        "error_status",
        "finish_reason",
        "is_background",
        "num_bytes",
        "response_id",
        "usage",
    )

    def __init__(
        self,
        api: Api,
        *,
        is_stream: bool,
        limit_bytes: int,
        on_first_token: Callable[[], None] | None,
        max_prompt_tokens: int = UNSEEN_TOKENS,
    ) -> None:
        """`max_prompt_tokens`: more than that is no plausible report."""
        self.api = api
        self.num_bytes = 0  # of the body, so far
        self._max_prompt_tokens = max_prompt_tokens
        self.is_background = False  # of a job that outlives its connection; known at the end
        self._sse = SseObserver(api) if is_stream else None
        self._unread: list[bytes] = []
        self._room_bytes = 0 if is_stream else limit_bytes  # how much more may wait unread
        self._on_first_token: Callable[[], None] | None = on_first_token
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.response_id: str | None = None
        self.error_status: int | None = None  # the status that an error inside a good answer stands for

    @property
    def is_mid_event(self) -> bool:
        self._catch_up()
        return self._sse is not None and self._sse.is_mid_event

    @property
    def is_complete(self) -> bool:
        """A stream whose closing event has passed: nothing is missing whatever the connection does."""
        self._catch_up()
        return self._sse is not None and self._sse.is_complete

    @property
    def has_content(self) -> bool:
        """Of a stream: an event has passed that is more than an opening."""
        return self._sse is None or self._sse.has_content

    def take_openings_for_content(self) -> None:
        """The client needs them too: the first event of a background job brings its id."""
        if self._sse is not None:
            self._sse.takes_openings_for_content = True

    @property
    def is_stream(self) -> bool:
        return self._sse is not None

    @property
    def num_events(self) -> int:
        """Of a stream, so far. 0 for a whole answer."""
        self._catch_up()
        return 0 if self._sse is None else self._sse.num_events

    @property
    def has_first_token(self) -> bool:
        return self._sse is not None and self._sse.has_first_token

    def read_error(self, *, is_last: bool) -> int | None:
        """Return the status that the answer so far stands for if it reports an error, else None."""
        if self._sse is not None:
            return self._sse.error_status
        return error_in_json(b"".join(self._unread)) if is_last and self._room_bytes >= 0 else None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        self._unread.append(data)
        self.num_bytes += len(data)
        self._room_bytes -= len(data)
        if self._room_bytes < 0:
            self._make_room()

    def _make_room(self) -> None:
        if self._sse is None:
            if self.response_id is None and self._unread:
                self.response_id = id_at_head(self._unread[0])
            self._unread.clear()  # too long to be read: the room stays below zero
        else:
            self._catch_up()

    def _catch_up(self) -> None:
        """Read what has passed of a stream."""
        sse = self._sse
        if sse is None:
            return
        sse.feed(b"".join(self._unread))
        self._unread.clear()
        if self._on_first_token is not None and sse.has_first_token:
            self._on_first_token()
            self._on_first_token = None
        self.response_id = sse.response_id
        self._room_bytes = BATCH_BYTES if sse.has_first_token else 0

    def finish(self) -> None:
        """Read what the end of the answer tells. Also after a broken stream: usage so far counts."""
        if self._sse is not None:
            self._catch_up()
            self.usage, self.finish_reason = self._sse.usage, self._sse.finish_reason
            self.response_id, self.error_status = self._sse.response_id, self._sse.error_status
            self.is_background = self._sse.is_background
        elif self._room_bytes >= 0:
            body = b"".join(self._unread)
            self.usage, self.finish_reason, self.response_id = observe_json(self.api, body)
            self.error_status = error_in_json(body)
            self.is_background = self.api is Api.RESPONSES and is_background(body)
        if self.usage is not None:
            self.usage = plausible(self.usage, self._max_prompt_tokens, self.num_bytes + UNSEEN_TOKENS)
        self._unread.clear()
        self._on_first_token = None  # it knows the turn, which knows us: leave no cycle to the collector
