"""Limits and timeouts towards clients.

Decision: defaults fit long agent conversations (64 MiB bodies, 32 KiB header fields) instead of a web
site's; a client that stalls loses its connection, a slow one that moves does not.
"""

from __future__ import annotations

import msgspec

from gateway.downstream.cors import CorsSettings


class DownstreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the connections from clients."""

    max_body_bytes: int = 67_108_864
    """Longest request body, as received (64 MiB); longer ones get 413."""
    max_inline_body_bytes: int = 2_097_152
    """Longest body (2 MiB) that is parsed between the events of other clients' streams, some 10 ms long; a
    longer one, or a compressed one that may grow as long, is parsed in a helper process."""
    max_request_line_bytes: int = 32_768
    """Longest request line; a longer one gets 431."""
    max_header_field_bytes: int = 32_768
    """Longest single header field, name and value; a longer one gets 431."""
    max_headers: int = 256
    """Most header fields of one request; more get 431."""
    max_connections: int | None = None
    """Most client connections at once; one more is told 503. Absent: half of what the process's limit of
    open files leaves, because each request may need a second descriptor towards its backend."""
    keep_alive_timeout_s: float = 75.0
    """How long a connection may idle between requests. It is also the longest time a request's head may
    take to arrive. Longer than the idle timeout of common load balancers (60 s), so that they close first."""
    body_idle_timeout_s: float = 60.0
    """Longest silence while a request body arrives; then 408."""
    body_min_bytes_per_s: int = 256
    """Slowest average rate at which a body may arrive once `body_idle_timeout_s` has passed; below it 408."""
    write_stall_timeout_s: float = 120.0
    """How long a client may take nothing at all of a response that waits for it; then it is cut off."""
    write_buffer_bytes: int = 262_144
    """Response bytes held for a slow client before its backend is held back."""
    unacknowledged_timeout_s: float = 120.0
    """How long sent bytes may stay unacknowledged, or a client's receive window closed, before the kernel
    counts it as lost (Linux; a client whose network vanished sends no FIN). An idle one is probed by TCP
    keep-alive after the same time."""
    linger_s: float = 2.0
    """How long the rest of a refused request is read and thrown away, so that the client can read why."""
    sse_keepalive_s: float | None = None
    """Longest silence of an event stream towards its client, from the backend's response head on: before it
    is over a comment is sent. For balancers with a short idle timeout. Absent: no comments."""
    cors: CorsSettings | None = None
    """Which web pages may call the gateway from a browser, by HTTP or WebSocket; absent: as backends say."""
    probe_half_closed: bool = True
    """Whether a client that has shut down its sending side may still get its answer (see `connection`).
    False takes that for a client that has gone."""

    def __post_init__(self) -> None:
        for name in (
            "keep_alive_timeout_s",
            "body_idle_timeout_s",
            "write_stall_timeout_s",
            "unacknowledged_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0")
        if self.sse_keepalive_s is not None and not self.sse_keepalive_s >= 0.1:
            raise ValueError("sse_keepalive_s must be at least 0.1")
        for name in ("max_body_bytes", "max_inline_body_bytes", "max_headers", "write_buffer_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_connections is not None and self.max_connections < 1:
            raise ValueError("max_connections must be at least 1")
        for name in ("max_request_line_bytes", "max_header_field_bytes"):
            if getattr(self, name) < 256:
                raise ValueError(f"{name} must be at least 256")
        if self.linger_s < 0 or self.body_min_bytes_per_s < 0:
            raise ValueError("linger_s and body_min_bytes_per_s must not be negative")
