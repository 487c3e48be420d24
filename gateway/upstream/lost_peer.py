"""Noticing a peer whose machine or network has vanished: it sends neither FIN nor RST.

Decision: let the kernel do it. `TCP_USER_TIMEOUT` bounds how long sent bytes stay unacknowledged (Linux's
own bound is a quarter of an hour), and keep-alive probes turn silence into such bytes. Where the system
does not know an option, the timeouts of the layers above remain.
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol


class _Socket(Protocol):
    """What both asyncio's and uvloop's socket objects offer."""

    @property
    def family(self) -> int: ...

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...


def notice_lost_peer(sock: _Socket | None, timeout_s: float) -> None:
    """Make the connection fail when the peer has not answered TCP for `timeout_s` or a little more."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    probe_interval_s = max(1, round(timeout_s / 4))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, round(timeout_s))),
        ("TCP_KEEPINTVL", probe_interval_s),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", round(timeout_s * 1000)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def reset_on_close(sock: _Socket | None) -> None:
    """Have the next close send a reset instead of the regular end (SO_LINGER with no time)."""
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
