"""The protocol between a service and systemd, or another service manager that implements it.

The manager may pass listening sockets, as descriptors from 3 on (`LISTEN_FDS`, `LISTEN_PID`,
`LISTEN_FDNAMES`), so that the port stays open across restarts. The service reports ready, reloading and
stopping, each as one datagram to `NOTIFY_SOCKET`. The protocol is small and stable (sd_listen_fds(3),
sd_notify(3)), so no library is needed.

The processes of `workers: N` are children of the one that systemd started: they inherit its sockets, and
accept a `LISTEN_PID` that names their parent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

FIRST_DESCRIPTOR = 3
NAMES = ("data", "admin")
"""Known descriptor names; unnamed sockets are assigned in this order."""


def inherited_sockets(environ: Mapping[str, str], *, is_worker: bool) -> dict[str, socket.socket]:
    """Return the listening sockets that the service manager has opened, by name.

    Raises ValueError for a name that is unknown or given twice.
    """
    owner = os.getppid() if is_worker else os.getpid()
    sockets = {name: socket.socket(fileno=fd) for name, fd in inherited_names(environ, owner).items()}
    for sock in sockets.values():
        sock.setblocking(False)
        sock.set_inheritable(False)
    return sockets


def inherited_names(environ: Mapping[str, str], owner: int) -> dict[str, int]:
    """Return the descriptor of each name, if they were passed to the process `owner`. Raises ValueError."""
    if environ.get("LISTEN_PID") != str(owner):
        return {}
    count = int(environ.get("LISTEN_FDS") or "0")
    names = [name for name in environ.get("LISTEN_FDNAMES", "").split(":") if name]
    if not set(names) & set(NAMES):  # unnamed: systemd then uses the name of the unit
        names = list(NAMES[:count])
    if len(names) != count or not set(names) <= set(NAMES) or len(set(names)) != count:
        raise ValueError(
            f"{count} sockets were passed with the names {environ.get('LISTEN_FDNAMES')!r}:"
            " pass at most two, named data and admin (FileDescriptorName= in the socket unit)"
        )
    return {name: FIRST_DESCRIPTOR + number for number, name in enumerate(names)}


def notify(state: str, environ: Mapping[str, str]) -> None:
    """Notify the service manager, if there is one. Never fails: the service must not depend on it."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(state.encode(), address)


def notify_ready(environ: Mapping[str, str]) -> None:
    notify("READY=1", environ)


def notify_stopping(environ: Mapping[str, str]) -> None:
    notify("STOPPING=1", environ)


def notify_reloading(environ: Mapping[str, str]) -> None:
    """Must be followed by `notify_ready`. The time lets the manager ignore an earlier ready."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}", environ)
