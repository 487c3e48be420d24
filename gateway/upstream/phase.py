"""The phases of a connection to a backend, and the moves between them.

IDLE ──▶ SENT ──▶ HEAD ──▶ BODY ──▶ COMPLETE ──▶ IDLE
                    └────▶ TUNNEL                       each of them ──▶ CLOSED
"""

from __future__ import annotations

import enum
from typing import Final


class Phase(enum.IntEnum):
    """Where a connection stands with the request it serves. (An IntEnum hashes without Python code.)"""

    IDLE = enum.auto()  # open, serves nothing
    SENT = enum.auto()  # request written, no byte of an answer yet
    HEAD = enum.auto()  # the head has begun to arrive
    BODY = enum.auto()  # the head is complete
    COMPLETE = enum.auto()  # the answer is complete, and the connection not yet given back
    TUNNEL = enum.auto()  # the backend has switched protocols
    CLOSED = enum.auto()  # closing or closed; serves nothing any more


NEXT: Final = {
    Phase.IDLE: frozenset({Phase.SENT, Phase.CLOSED}),
    Phase.SENT: frozenset({Phase.HEAD, Phase.CLOSED}),
    Phase.HEAD: frozenset({Phase.BODY, Phase.TUNNEL, Phase.CLOSED}),
    Phase.BODY: frozenset({Phase.COMPLETE, Phase.CLOSED}),
    Phase.COMPLETE: frozenset({Phase.IDLE, Phase.CLOSED}),
    Phase.TUNNEL: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset({Phase.CLOSED}),
}
"""The legal moves. Any other is a bug of ours."""
