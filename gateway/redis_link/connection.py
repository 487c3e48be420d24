"""redis-py's connections, made to tell when Redis owes an answer and to be replaced when it is the wrong one.

redis-py has a class for each kind of connection (TCP, TLS, Unix, behind Sentinels). What is added here is the
same for all: `measured` derives from the class it is given.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from gateway.redis_link.trips import current_trip

_WRONG_SERVER = re.compile(r"(?:^|[\s:-])(READONLY|MOVED|LOADING|MASTERDOWN|CLUSTERDOWN)\s")


def error_code(error: RedisError) -> str:
    """The first word of an error reply, which redis-py keeps apart from the text of those that it knows."""
    return (getattr(error, "status_code", None) or str(error).partition(" ")[0])[:40]


def is_wrong_server(error: RedisError) -> bool:
    """Whether the server says that somebody else should be asked: it is a replica, belongs to another part
    of a Cluster, or has not loaded its data. Before Redis 7 the error of a script has this word inside."""
    return _WRONG_SERVER.search(f"{error_code(error)} {error}") is not None


class Era:
    """Connections that were opened in an earlier era are replaced before they are used again."""

    number = 0


if TYPE_CHECKING:
    _Base = AbstractConnection
else:
    _Base = object


class _Measured(_Base):
    """The addition to a class of connections; see the module."""

    era: Era
    _opened_in = 0
    _is_reaching = False  # connecting or sending, which suspends only if the other side does not keep up

    @property
    def owes_answer(self) -> bool:
        """`trips.Socket`. A reader's waiter is there from when somebody begins to wait until bytes arrive,
        not until the one who waits gets its turn."""
        reader: Any = self._reader
        return self._is_reaching or (reader is not None and reader._waiter is not None)

    def abort(self) -> None:
        """`trips.Socket`. An attempt to connect has a timeout of its own."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def connect(self) -> None:
        """Connect if necessary; the host's name is resolved each time."""
        if self._opened_in != self.era.number:
            await self.disconnect(nowait=True)
        if not self.is_connected:
            self._opened_in = self.era.number
            with self._in_use(is_reaching=True):
                await super().connect()  # type: ignore[no-untyped-call]  # redis-py

    async def send_packed_command(self, *arguments: Any, **options: Any) -> None:
        with self._in_use(is_reaching=True):
            await super().send_packed_command(*arguments, **options)

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        with self._in_use(is_reaching=False):
            return await super().read_response(*arguments, **options)

    @contextlib.contextmanager
    def _in_use(self, *, is_reaching: bool) -> Iterator[None]:
        """Show the trip which connection it waits for. Nests: connecting sends and reads too."""
        outer_reaching, self._is_reaching = self._is_reaching, is_reaching
        trip = current_trip.get()
        if trip is None:
            try:
                yield
            finally:
                self._is_reaching = outer_reaching
            return
        outer_socket, trip.socket = trip.socket, self
        try:
            yield
        finally:
            self._is_reaching, trip.socket = outer_reaching, outer_socket


def measured(kind: type[AbstractConnection], era: Era) -> type[AbstractConnection]:
    """Derive a class of connections that tells trips what it owes and follows the era."""
    return type(f"Measured{kind.__name__}", (_Measured, kind), {"era": era})
