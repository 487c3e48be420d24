"""Keep-alive connections to one backend: which one serves the next request, and when one goes.

Decisions: last used, first taken (LIFO), so that few connections stay warm and the rest expire; unused
ones close before the engine's own keep-alive would close them. No waiting for a free connection: waiting
belongs to admission, where it has a queue, priorities and a deadline.

The stale-connection rule. A backend may close an idle connection in the same moment in which a request
is written to it. When a *reused* connection ends without a single response byte, the request is sent
again, once, on a fresh connection. This cannot be told apart from a backend that read the request and
died before it answered; so a request that must not run twice passes `replayable=False` and gets
`UpstreamReset` instead. A reset of a fresh connection is never hidden.

Invariant: every connection is in `_connections` from its first to its last moment; when `close` returns,
none is left. Knows nothing of routing, retries between backends, or clients.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import re
import ssl
from dataclasses import dataclass

from gateway.errors import (
    Overloaded,
    UpstreamConnectFailed,
    UpstreamPoolFull,
    UpstreamRefused,
    UpstreamReset,
)
from gateway.scheduling.rounds import rounds_of_loop
from gateway.upstream.address import Address, parse_base_url
from gateway.upstream.answer import UpstreamAnswer
from gateway.upstream.connection import UpstreamConnection
from gateway.upstream.exchange import Exchange
from gateway.upstream.forbidden_peer import refuse_forbidden_peer
from gateway.upstream.phase import Phase
from gateway.upstream.settings import UpstreamSettings
from gateway.upstream.tls import make_client_context

NUM_CONNECT_PARTS = 4

# Our own resources, not the backend's fault: no file descriptor, no memory, no local port left.
_OUR_OWN_SHORTAGE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
_NOBODY_LISTENS = frozenset((errno.ECONNREFUSED, errno.ENOENT))  # ENOENT: of a socket file
_ERRNO_IN_TEXT = re.compile(r"\[Errno (\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """What a pool holds now, and what it has done since it was made."""

    num_idle: int
    num_active: int
    num_connecting: int
    num_opened_total: int
    num_reused_total: int
    num_stale_total: int
    num_connect_failed_total: int


class UpstreamPool:
    """All connections to one backend. Belongs to one event loop."""

    def __init__(self, base_url: str, settings: UpstreamSettings) -> None:
        """Raises ValueError for an unusable URL or TLS files. Connects to nothing."""
        self.address: Address = parse_base_url(base_url)
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._rounds = rounds_of_loop()
        self._tls = make_client_context(settings.tls) if self.address.is_tls else None
        self._connections: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []
        self._is_closed = False
        self._all_lost: asyncio.Future[None] | None = None
        self._tick_s = _tick_interval_s(settings)
        self._ticker: asyncio.TimerHandle | None = None
        self._num_connecting = 0
        self._num_opened = 0
        self._num_reused = 0
        self._num_stale = 0
        self._num_connect_failed = 0

    # -- for the proxy

    async def open(
        self,
        head: bytes,
        body: bytes,
        *,
        method: str = "POST",
        replayable: bool = True,
        may_upgrade: bool = False,
    ) -> Exchange:
        """Send one request and wait for the head of its answer.

        `head` is complete, from the request line to the empty line. Raises UpstreamConnectFailed,
        UpstreamReset, UpstreamProtocolError or UpstreamTimeout (try another backend), or Overloaded when
        this machine has no descriptor left. Cancelling closes the connection that was in use.
        With `may_upgrade` the answer may be a 101, to be tunnelled.
        """
        is_head_request = method == "HEAD"
        exchange = self._make_exchange(may_upgrade)
        if self.start_on_idle(exchange, head, body, is_head_request=is_head_request):
            try:
                return await exchange.head_arrived()
            except UpstreamReset as error:
                if not (error.is_stale and replayable):
                    raise
            exchange = self._make_exchange(may_upgrade)
            self.note_stale()
        connection = await self.connect()
        connection.start(exchange, head, body, is_head_request=is_head_request)
        return await exchange.head_arrived()

    def start_on_idle(
        self, answer: UpstreamAnswer, head: bytes, body: bytes, *, is_head_request: bool = False
    ) -> bool:
        """Send one request on a connection that is open already. False: there is none, see `connect`."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.is_usable and not connection.arrived:
                self._num_reused += 1
                connection.start(answer, head, body, is_head_request=is_head_request)
                return True
        return False

    def note_stale(self) -> None:
        """A request is sent again because its connection had been closed by the backend (`is_stale`)."""
        self._num_stale += 1

    def _make_exchange(self, may_upgrade: bool) -> Exchange:
        exchange = Exchange(self._loop.create_future(), self._settings.max_early_body_bytes)
        exchange.may_upgrade = may_upgrade
        return exchange

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<UpstreamPool {self.address.host_header.decode()}: {stats.num_idle} idle, "
            f"{stats.num_active} active, {stats.num_connecting} connecting>"
        )

    def stats(self) -> PoolStats:
        return PoolStats(
            num_idle=len(self._idle),
            num_active=len(self._connections) - len(self._idle),
            num_connecting=self._num_connecting,
            num_opened_total=self._num_opened,
            num_reused_total=self._num_reused,
            num_stale_total=self._num_stale,
            num_connect_failed_total=self._num_connect_failed,
        )

    def silent_for_s(self) -> float:
        """Return the seconds since an answer under way last brought bytes; inf if none is. O(connections).

        It is read from the deadlines, so that it costs nothing while bytes flow.
        """
        deadlines = (
            connection.deadline_s
            for connection in self._connections
            if connection.deadline_s < math.inf
            and (connection.phase is Phase.TUNNEL or (connection.phase is Phase.BODY and connection.has_body))
        )
        last_s = max(deadlines, default=-math.inf) - self._settings.idle_timeout_s
        return self._loop.time() - last_s

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Take no more requests; let running ones finish for `grace_s`, then abort them. Idempotent."""
        self._is_closed = True
        for connection in tuple(self._idle):
            connection.close()
        self._idle.clear()
        try:
            await self._wait_all_lost(grace_s)
        finally:  # cancelled or not, nothing survives
            for connection in tuple(self._connections):
                connection.stop()
        await self._wait_all_lost(1.0)
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    # -- ConnectionOwner: for the connections

    def on_idle(self, connection: UpstreamConnection) -> None:
        if self._is_closed or len(self._idle) >= self._settings.max_idle_connections:
            connection.close()
        else:
            self._idle.append(connection)

    def on_lost(self, connection: UpstreamConnection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if not self._connections and self._all_lost is not None and not self._all_lost.done():
            self._all_lost.set_result(None)

    # -- inside

    async def _wait_all_lost(self, timeout_s: float) -> None:
        """Until no connection is left, or `timeout_s` has passed."""
        if self._connections and timeout_s > 0:
            if self._all_lost is None:
                self._all_lost = self._loop.create_future()
            await asyncio.wait((self._all_lost,), timeout=timeout_s)

    async def connect(self) -> UpstreamConnection:
        """Open a connection; the caller must `start` a request on it, or close it.

        Raises UpstreamConnectFailed (UpstreamRefused when nobody listens there), or Overloaded when this
        machine has no descriptor left.
        """
        if self._is_closed:
            raise UpstreamConnectFailed("this backend has been removed")
        if len(self._connections) + self._num_connecting >= self._settings.max_connections:
            raise UpstreamPoolFull(f"all {self._settings.max_connections} connections to it are in use")
        self._num_connecting += 1
        try:
            connection = await self._dial_patiently(self._settings.connect_timeout_s)
        except TimeoutError as exc:
            self._num_connect_failed += 1
            limit_s = self._settings.connect_timeout_s
            raise UpstreamConnectFailed(f"no connection within {limit_s:g} s") from exc
        except OSError as exc:
            self._num_connect_failed += 1
            if exc.errno in _OUR_OWN_SHORTAGE:
                raise Overloaded(f"the gateway cannot open another connection: {exc.strerror}") from exc
            kind = UpstreamRefused if is_refusal(exc) else UpstreamConnectFailed
            raise kind(f"connect failed: {_connect_reason(exc)}") from exc
        finally:
            self._num_connecting -= 1
        self._num_opened += 1
        self._adopt(connection)
        return connection

    def _adopt(self, connection: UpstreamConnection) -> None:
        """Take responsibility for a new connection.

        Only now, not in `connection_made`: when a connect is cancelled at its last moment, uvloop closes
        the socket without telling the protocol, and the connection would be counted for ever.
        """
        if self._is_closed or not connection.is_usable:  # either happened while we were connecting
            connection.close()
            raise UpstreamConnectFailed("the connection ended as soon as it was made")
        self._connections.add(connection)
        if self._ticker is None:
            self._ticker = self._loop.call_later(self._tick_s, self._tick)

    async def _dial_patiently(self, limit_s: float) -> UpstreamConnection:
        """Dial; raise TimeoutError when the backend has not answered within `limit_s`.

        The limit is counted in parts, so that one long pause of our own event loop (a storm of new streams,
        a busy machine) uses up one part only: it must not look as if every backend had failed to answer.
        """
        dialling = asyncio.ensure_future(self._dial())
        is_handed_over = False
        try:
            for _ in range(NUM_CONNECT_PARTS):
                await asyncio.wait((dialling,), timeout=limit_s / NUM_CONNECT_PARTS)
                if dialling.done():
                    is_handed_over = True
                    return dialling.result()
            raise TimeoutError
        finally:
            if not is_handed_over:
                dialling.cancel()
                dialling.add_done_callback(_close_unwanted)

    async def _dial(self) -> UpstreamConnection:
        address = self.address
        if address.unix_path is not None:
            _, connection = await self._loop.create_unix_connection(self._make_connection, address.unix_path)
            return connection
        server_name = (self._settings.tls.server_name or address.host) if self._tls is not None else None
        transport, connection = await self._loop.create_connection(
            self._make_connection, address.host, address.port, ssl=self._tls, server_hostname=server_name
        )
        refuse_forbidden_peer(transport)
        return connection

    def _make_connection(self) -> UpstreamConnection:
        return UpstreamConnection(self, self._settings, self._rounds)

    def _tick(self) -> None:
        """Compare every connection's deadline; runs while there is one. O(connections), twice a second."""
        now_s = self._loop.time()
        for connection in tuple(self._connections):
            if connection.deadline_s <= now_s:
                connection.expire()
        if self._connections:
            self._ticker = self._loop.call_later(self._tick_s, self._tick)
        else:
            self._ticker = None


def _close_unwanted(dialling: asyncio.Future[UpstreamConnection]) -> None:
    """A connect that was given up, or cancelled, in the moment in which it succeeded."""
    if not dialling.cancelled() and dialling.exception() is None:
        dialling.result().close()


def _tick_interval_s(settings: UpstreamSettings) -> float:
    """An eighth of the shortest limit, so that no limit is exceeded by more than that; at most 0.5 s."""
    shortest_s = min(settings.first_byte_timeout_s, settings.idle_timeout_s, settings.idle_expiry_s)
    return min(0.5, max(0.005, shortest_s / 8))


def is_refusal(exc: OSError) -> bool:
    """Whether nobody listens, at any of the addresses that the name has."""
    if exc.errno is not None:
        return exc.errno in _NOBODY_LISTENS
    # asyncio and uvloop put the errors of several addresses (localhost: ::1 and 127.0.0.1) into one text
    numbers = _ERRNO_IN_TEXT.findall(str(exc))
    return bool(numbers) and all(int(number) in _NOBODY_LISTENS for number in numbers)


def _connect_reason(exc: OSError) -> str:
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"TLS certificate refused: {exc.verify_message}"
    if isinstance(exc, ssl.SSLError):
        return f"TLS failed: {exc.reason or exc}"
    if exc.errno is not None and exc.errno > 0:  # a resolver's are negative and its own
        return os.strerror(exc.errno)  # asyncio's own text hides the reason behind the address
    return str(exc)
