"""One answer of a backend, as its connection delivers it: fields for the head, three calls for the rest.

Whoever sends a request derives from `UpstreamAnswer` and overrides `on_head`, `on_data` and `on_failure`. The
connection calls them synchronously, from its own callbacks, in this order:

    on_head      once, when the head's fields are filled in (interim 1xx answers are skipped)
    on_data      for each read of the socket that brought body bytes; the last call says `is_last`
    on_failure   instead of what is missing, when the connection is lost or the framing is broken

`Exchange` is the implementation for code that awaits; `request.attempt` the one that relays to a client.
Knows nothing of framing (see `connection`), pools or clients.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.errors import UpstreamError, UpstreamReset


class Carrier(Protocol):
    """The connection below, as far as an answer needs it."""

    def pause_body(self) -> None: ...

    def resume_body(self) -> None: ...

    def drop(self) -> None: ...

    def take_over(self) -> asyncio.Transport: ...

    def touch(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


class UpstreamAnswer:
    """Base of all answers. After its end, or after `abort`, it holds no connection."""

    __slots__ = (
        "carrier",
        "content_length",
        "early",
        "headers",
        "is_chunked",
        "may_upgrade",
        "reason",
        "status",
    )

    def __init__(self) -> None:
        self.carrier: Carrier | None = None  # set while the connection works for this answer
        self.status = 0
        self.reason = b""
        self.headers: list[tuple[bytes, bytes]] = []  # names in lower case, values as received
        self.is_chunked = False
        self.content_length: int | None = None
        self.may_upgrade = False
        self.early = b""  # bytes of the new protocol that came with a 101

    # -- called by the connection

    def on_head(self) -> None:
        """The head is complete. May abort the answer."""
        raise NotImplementedError

    def on_data(self, data: bytes, is_last: bool) -> None:
        """Take the body bytes of one read; `is_last` with those that complete the body, perhaps none."""
        raise NotImplementedError

    def on_failure(self, error: UpstreamError) -> None:
        """The answer ends here, incomplete. `carrier` is gone."""
        raise NotImplementedError

    # -- for whoever reads the answer

    def pause(self) -> None:
        """Read no more of the body until `resume`. Idempotent."""
        if self.carrier is not None:
            self.carrier.pause_body()

    def resume(self) -> None:
        if self.carrier is not None:
            self.carrier.resume_body()

    def abort(self) -> None:
        """Stop at once and close the connection, unless the answer is complete. Idempotent."""
        carrier, self.carrier = self.carrier, None
        if carrier is not None:
            carrier.drop()

    def take_over(self) -> tuple[Carrier, asyncio.Transport]:
        """Of an upgraded answer (status 101): its connection and the transport, which is not read yet.

        The new protocol must call the connection's `connection_lost`, and `touch` when bytes pass.
        Raises UpstreamReset when the backend has closed meanwhile.
        """
        carrier, self.carrier = self.carrier, None
        if self.status != 101 or carrier is None:
            raise UpstreamReset("the backend closed the connection right after its upgrade")
        return carrier, carrier.take_over()
