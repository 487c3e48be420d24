"""What an idle keep-alive connection costs a gateway in memory."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import struct
from contextlib import ExitStack
from typing import Any

from bench.gateway.measure import rss_kb

NUM_CONNECTIONS = (1_000, 10_000)
SPARE_DESCRIPTORS = 600  # for the backends' connections, pipes and files of a gateway
NUM_SESSIONS = 64


def allowed_counts() -> tuple[int, ...]:
    """Raise the limit of open files as far as we may; return how many connections to try, in order."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = NUM_CONNECTIONS[-1] if hard == resource.RLIM_INFINITY else hard - SPARE_DESCRIPTORS
    return tuple(sorted({min(count, most) for count in NUM_CONNECTIONS}))


def measure_idle(port: int, pid: int, counts: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """Open connections up to each count, one answered request on each; KB of RSS per connection by count.

    `num_errors` is how many the gateway has closed since. Raises OSError and HTTPException where it refuses.
    """
    for session in range(NUM_SESSIONS):  # what the first requests allocate is not the connections'
        _ask(port, session).close()
    base_kb, results = rss_kb(pid), {}
    with ExitStack() as cleanup:
        opened: list[socket.socket] = []
        for count in counts:
            for index in range(len(opened), count):
                connection = _ask(port, index % NUM_SESSIONS)
                cleanup.callback(connection.close)
                opened.append(connection.sock)
            kb_per_connection = (rss_kb(pid) - base_kb) / count
            num_closed = sum(_is_closed(open_socket) for open_socket in opened)
            results[count] = {"kb_per_connection": kb_per_connection, "num_bad": 0, "num_errors": num_closed}
    return results


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def _ask(port: int, session: int) -> http.client.HTTPConnection:
    """A connection on which one request was answered, and which stays open."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.connect()
    # Closed by a reset: no TIME_WAIT holds the port of ten thousand of them.
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    body = json.dumps({"model": "mock-model", "messages": [{"role": "user", "content": "hi"}]})
    headers = {
        "content-type": "application/json",
        "x-session-id": f"session-{session}",
        "authorization": "Bearer sk-bench-0123456789",
    }
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    answer.read()
    if connection.sock is not None:
        connection.sock.setblocking(False)  # from now on it is only looked at
    if answer.status != 200 or connection.sock is None:
        raise http.client.HTTPException(f"status {answer.status}, or not kept alive")
    return connection
