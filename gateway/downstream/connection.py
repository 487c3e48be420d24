"""One client connection: aiohttp's request handler, plus what a long-lived relay needs to know of it.

Three decisions live here, all in asyncio's documented protocol callbacks:

*Back-pressure.* `pause_writing` and `resume_writing` hold the relay's source back; a client that takes
nothing at all for `write_stall_timeout_s` is cut off.

*A client that sends FIN.* Two clients look alike: one that has gone (closed its socket) and one that only
finished sending and waits for its answer. The first must stop the engine at once, the second must be
served. The difference shows only when something is sent: the kernel of a gone client answers with a reset.
So on FIN during a complete HTTP/1.1 request we send what a client must ignore: `100 Continue` before the
answer (RFC 9110, 15.2: any client must be able to parse it; http.client skips no other interim status), an
SSE comment inside an event stream; in any other body the next bytes do that work. The first probe draws
the reset, the next write meets it, so probes follow each other quickly and then slow down; there are at
most five, because Go's client refuses more interim answers. HTTP/1.0 and TLS have no such probe: there,
and for a request that is not complete, FIN means gone.

*A request that cannot be parsed* gets a JSON error and a closed connection; what the client is still
sending is thrown away for `linger_s`, because closing with unread bytes would reset the connection and
could destroy the answer before the client has read it.

Knows nothing of backends, sessions or API dialects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

from aiohttp import HttpVersion11, web

from gateway.downstream.refusal import (
    TOO_MANY_CONNECTIONS,
    Refusal,
    RefusalResponse,
    refusal_for,
)
from gateway.downstream.settings import DownstreamSettings
from gateway.upstream.lost_peer import notice_lost_peer

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

# Delays before each probe: the first at once, the second when a near client's reset is back, the rest
# spread over the round trips of far ones.
PROBE_DELAYS_S = (0.0, 0.01, 0.05, 0.25, 1.0)
IDLE_AFTER_FIN_S = 0.05

# How many clients beyond the limit may linger; half of the descriptors that `server` keeps in reserve.
NUM_TURNED_AWAY_GENTLY = 32


class Relay(Protocol):
    """The answer under way on this connection, as far as the connection needs it."""

    @property
    def has_started(self) -> bool: ...

    def hold_back(self) -> None: ...

    def let_go(self) -> None: ...

    def send_comment(self) -> bool: ...

    def fail(self) -> None:
        """End it so that it never looks complete; does nothing after its end."""

    @property
    def survives_fin(self) -> bool:
        """A client that only finished sending may still want the rest."""


class OpenConnections:
    """What all client connections of one server have in common."""

    def __init__(self, limit: int) -> None:
        self.count = 0
        self.limit = limit
        self.is_leaving = False  # each answer ends its connection, so that clients go elsewhere


class ClientConnection(web.RequestHandler):
    """Made by `server.make_server` for each accepted socket."""

    __slots__ = (
        "_half_closed_timer",
        "_has_answer_begun",
        "_has_new_input",
        "_is_refusing",
        "_num_probes",
        "_on_refusal",
        "_open",
        "_settings",
        "_stall_timer",
        "_stalled_bytes",
        "is_half_closed",
        "relay",
        "request",
    )

    def __init__(
        self,
        manager: web.Server,
        *,
        settings: DownstreamSettings,
        open_connections: OpenConnections,
        on_refusal: Callable[[Refusal], None] | None,
        **aiohttp_options: Any,
    ) -> None:
        super().__init__(manager, **aiohttp_options)
        self._settings = settings
        self._on_refusal = on_refusal
        self._open = open_connections
        self._half_closed_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._num_probes = 0
        self._has_answer_begun = False
        self._has_new_input = False  # since the last handler began
        self._is_refusing = False
        self._stalled_bytes = 0
        self.is_half_closed = False
        self.request: web.BaseRequest | None = None  # being handled now
        self.relay: Relay | None = None

    # -- for the server

    @property
    def is_leaving(self) -> bool:
        return self._open.is_leaving

    @property
    def sse_keepalive_s(self) -> float | None:
        return self._settings.sse_keepalive_s

    def begin(self, request: web.BaseRequest) -> None:
        """A handler starts."""
        self.request = request
        self._has_answer_begun = False
        self._has_new_input = False
        if self.is_half_closed:
            self._begin_half_closed(request)

    def end(self) -> None:
        """The handler is done; its answer is written, or given to aiohttp."""
        self._has_answer_begun = self.relay is not None and self.relay.has_started
        self.request = None
        self.relay = None
        self._cancel_half_closed_timer()
        if self.is_half_closed:
            self._close_unless_a_request_follows()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        notice_lost_peer(transport.get_extra_info("socket"), self._settings.unacknowledged_timeout_s)
        high = self._settings.write_buffer_bytes
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=high, low=high // 4)
        self._open.count += 1
        if self._open.count > self._open.limit:
            self._turn_away()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._open.count -= 1
        self._cancel_half_closed_timer()
        self._cancel_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refusing:
            return
        self._has_new_input = True
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio: bool | None; aiohttp narrows it
        """FIN. True keeps our sending side open."""
        super().eof_received()
        request = self.request
        if self.transport is None or not self._settings.probe_half_closed:
            return False
        if self.transport.get_extra_info("sslcontext") is not None:
            return False
        if request is None:
            if not self._has_new_input:
                return False
            self._close_unless_a_request_follows()  # FIN right behind a request
        elif _can_be_probed(request) and (self.relay is None or self.relay.survives_fin):
            self._num_probes = 0
            self._probe()
        else:
            return False
        self.is_half_closed = True
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.relay is not None:
            self.relay.hold_back()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stall()
        if self.relay is not None:
            self.relay.let_go()

    # -- aiohttp's hook for requests it cannot parse and handlers that fail

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer with an OpenAI-shaped error, and close.

        Raises ConnectionError, which makes aiohttp drop the connection, when an answer has begun.
        """
        refusal = refusal_for(status, exc)
        if status >= 500:
            self.logger.error("request_handler_failed", exc_info=exc)
        if self._on_refusal is not None:
            self._on_refusal(refusal)
        if self._has_answer_begun or request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent: no other one can follow")
        self._is_refusing = True
        return RefusalResponse(refusal, self._settings.linger_s)

    def _turn_away(self) -> None:
        """Say why there is no place, while there is a descriptor left to say it with.

        A few at a time may send their request before the connection ends, so that they can read the answer.
        """
        if self._on_refusal is not None:
            self._on_refusal(TOO_MANY_CONNECTIONS)
        self._is_refusing = True
        assert self.transport is not None
        self.transport.write(TOO_MANY_CONNECTIONS.encode())
        if self._open.count > self._open.limit + NUM_TURNED_AWAY_GENTLY:
            self.transport.close()
        else:
            if self.transport.can_write_eof():
                self.transport.write_eof()
            loop = asyncio.get_running_loop()
            self._half_closed_timer = loop.call_later(self._settings.linger_s, self._close_when_idle)

    # -- half-closed clients

    def _begin_half_closed(self, request: web.BaseRequest) -> None:
        """A request that was complete before the FIN, or whose rest can never come."""
        self._cancel_half_closed_timer()
        if _can_be_probed(request):
            self._num_probes = 0
            self._probe()
        elif not request.content.is_eof() and self.transport is not None:
            self.transport.close()

    def _probe(self) -> None:
        self._half_closed_timer = None
        if self.request is None or self.transport is None:
            return
        if self.relay is not None and self.relay.has_started:
            self.relay.send_comment()
        elif self.request.writer.output_size == 0:
            self.transport.write(CONTINUE)
        self._num_probes += 1
        if self._num_probes < len(PROBE_DELAYS_S):
            delay_s = PROBE_DELAYS_S[self._num_probes]
            self._half_closed_timer = asyncio.get_running_loop().call_later(delay_s, self._probe)

    def _close_unless_a_request_follows(self) -> None:
        """Requests pipelined before the FIN are still to be served; they begin within a loop turn or two."""
        loop = asyncio.get_running_loop()
        self._half_closed_timer = loop.call_later(IDLE_AFTER_FIN_S, self._close_when_idle)

    def _close_when_idle(self) -> None:
        self._half_closed_timer = None
        if self.request is None and self.transport is not None:
            self.transport.close()

    def _cancel_half_closed_timer(self) -> None:
        if self._half_closed_timer is not None:
            self._half_closed_timer.cancel()
            self._half_closed_timer = None

    # -- clients that stop reading

    def _watch_stall(self) -> None:
        assert self.transport is not None
        self._stalled_bytes = self.transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._stall_timer = loop.call_later(self._settings.write_stall_timeout_s, self._on_stall)

    def _on_stall(self) -> None:
        self._stall_timer = None
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size() < self._stalled_bytes:
            self._watch_stall()  # slow, but moving
        else:
            self.transport.abort()

    def _cancel_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def _can_be_probed(request: web.BaseRequest) -> bool:
    """Complete, HTTP/1.1, and not being answered by aiohttp's own writer."""
    return request.content.is_eof() and request.version >= HttpVersion11 and request.writer.output_size == 0
