"""Where the gateway listens: sockets, and the servers that accept from them.

Decision: a listener owns its listening sockets and gives each server a duplicate. So what serves them can be
replaced without a moment in which nobody listens: a rotated certificate is a new server on the same socket,
connections that wait in the kernel's queue go to whichever accepts next, and open ones are not touched. The
socket may be our own, a Unix socket, or one handed over by the service manager.

Knows nothing of HTTP: what to do with a connection is the protocol factory's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

BACKLOG = 2048
LAST_HANDSHAKE_TIMEOUT_S = 2.0

_ADVICE = {
    errno.EADDRINUSE: "Stop what listens there, or choose another port",
    errno.EADDRNOTAVAIL: "No interface of this machine has this address: choose another host",
    errno.EACCES: "This needs a right that the process lacks: choose another place, a port above 1023",
    errno.ENOENT: "Its folder does not exist: make it, or choose another place",
}

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class CannotListen(OSError):
    """Which place could not be had, why, and what to do."""


@contextlib.contextmanager
def explained(option: str, place: str) -> Iterator[None]:
    """Raise CannotListen, naming the place and the option that chose it, for any OSError within."""
    try:
        yield
    except OSError as error:
        advice = "Choose another host" if isinstance(error, socket.gaierror) else "Choose another place"
        advice = _ADVICE.get(error.errno or 0, advice)
        reason = error.strerror or str(error)
        raise CannotListen(f"cannot listen on {place}: {reason}. {advice} in `{option}`.") from error


class Listener:
    """Accepts connections from its sockets, until `stop_accepting`."""

    def __init__(
        self, factory: ProtocolFactory, sockets: list[socket.socket], *, own_path: Path | None = None
    ) -> None:
        """`own_path`: the file of a Unix socket that is ours to remove."""
        self._factory, self._sockets, self._own_path = factory, sockets, own_path
        self._servers: list[asyncio.AbstractServer] = []
        self._tls: ssl.SSLContext | None = None

    @property
    def port(self) -> int:
        """The TCP port, 0 on a Unix socket."""
        address = self._sockets[0].getsockname()
        return int(address[1]) if isinstance(address, tuple) else 0

    async def serve(self, tls: ssl.SSLContext | None) -> None:
        """Accept with this context from now on. Raises OSError; what served before then goes on."""
        servers: list[asyncio.AbstractServer] = []
        try:
            for sock in self._sockets:
                servers.append(await self._serve_one(sock.dup(), tls))  # noqa: PERF401 - known if one fails
        except BaseException:
            _close(servers)
            raise
        if not self._sockets:  # stopped meanwhile
            _close(servers)
            return
        _close(self._servers)
        self._servers, self._tls = servers, tls

    async def _serve_one(self, sock: socket.socket, tls: ssl.SSLContext | None) -> asyncio.AbstractServer:
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            return await loop.create_unix_server(self._factory, sock=sock, ssl=tls, backlog=BACKLOG)
        return await loop.create_server(self._factory, sock=sock, ssl=tls, backlog=BACKLOG)

    async def stop_accepting(self) -> None:
        """Close the listening sockets; connections go on. Idempotent.

        Connections that wait in the kernel's queue at this moment would be reset by the close, though their
        clients count as connected: they are taken in before.
        """
        _close(self._servers)
        self._servers = []
        waiting: list[socket.socket] = []
        for sock in self._sockets:
            waiting += _accept_all(sock)
            sock.close()
        self._sockets = []
        if self._own_path is not None:
            self._own_path.unlink(missing_ok=True)
            self._own_path = None
        await asyncio.gather(*map(self._take_in, waiting), return_exceptions=True)

    async def _take_in(self, connection: socket.socket) -> None:
        timeout_s = None if self._tls is None else LAST_HANDSHAKE_TIMEOUT_S
        await asyncio.get_running_loop().connect_accepted_socket(
            self._factory, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
        )


def _accept_all(sock: socket.socket) -> list[socket.socket]:
    """Every connection that waits on this socket, without waiting for another."""
    found: list[socket.socket] = []
    with contextlib.suppress(OSError):
        while len(found) < BACKLOG:
            connection, _ = sock.accept()
            connection.setblocking(False)
            found.append(connection)
    return found


def _close(servers: list[asyncio.AbstractServer]) -> None:
    for server in servers:
        server.close()


async def open_tcp_sockets(host: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """A listening socket for each address of `host`. Raises OSError with nothing left open."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            if port == 0 and sockets:  # one free port for all addresses
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sockets.append(_listen(family, address, reuse_port=reuse_port))
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _listen(family: int, address: tuple[object, ...], *, reuse_port: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:  # `::` shall not take the place of `0.0.0.0`, which has its own socket
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def open_unix_socket(path: Path) -> socket.socket:
    """Listen on a path. A socket file that an earlier run left there is replaced; a live one is not.

    Raises OSError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _remove_stale(path)
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale(path: Path) -> None:
    """Remove a socket file behind which nobody listens."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # somebody listens, and is busy
