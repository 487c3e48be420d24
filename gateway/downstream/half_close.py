"""A client that has sent FIN: has it gone, or does it only send no more?

Both send the same FIN. The first must stop the engine at once, the second must be served. The difference
shows only when something is sent: the kernel of a gone client answers with a reset. So on FIN during a
complete HTTP/1.1 request we send what a client must ignore: `100 Continue` before the answer (RFC 9110,
15.2: any client must be able to parse it; http.client skips no other interim status), an SSE comment inside
an event stream; in any other body the next bytes do that work. The first probe draws the reset, the next
write meets it, so probes follow each other quickly and then slow down; there are at most five, because Go's
client refuses more interim answers. HTTP/1.0 and TLS have no such probe: there, and for a request that is
not complete, FIN means gone.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.downstream.request import CONTINUE, ClientRequest, Connection, Relay

# Delays before each probe: the first at once, the second when a near client's reset is back, the rest
# spread over the round trips of far ones.
PROBE_DELAYS_S: Final = (0.0, 0.01, 0.05, 0.25, 1.0)


def can_be_probed(request: ClientRequest, relay: Relay | None) -> bool:
    """Whether a client that has sent FIN may still want this answer, and can be asked."""
    return request.is_complete and request.is_http11 and (relay is None or relay.survives_fin)


class HalfClose:
    """Probes one client. The connection begins it with each request that is still to be served."""

    __slots__ = ("_connection", "_num_probes", "_timer")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_probes = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Probe now, and a few times later."""
        self._num_probes = 0
        self._probe()

    def stop(self) -> None:
        """The answer has ended, or the client has gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self) -> None:
        self._timer = None
        connection = self._connection
        if connection.request is None or connection.transport is None:
            return
        if connection.relay is not None and connection.relay.has_started:
            connection.relay.send_comment()
        else:
            connection.transport.write(CONTINUE)
        self._num_probes += 1
        if self._num_probes < len(PROBE_DELAYS_S):
            delay_s = PROBE_DELAYS_S[self._num_probes]
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._probe)
