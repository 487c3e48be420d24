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
    """Maximum size of a request body as received (64 MiB). Longer ones get 413."""
    max_inline_body_bytes: int = 2_097_152
    """Maximum size of a body (2 MiB, about 10 ms) that is parsed in the event loop, which delays the streams
    of other clients. A longer body, or a compressed one that may grow longer, is parsed in a helper
    process."""
    max_request_line_bytes: int = 32_768
    """Maximum length of the request line. Longer ones get 431."""
    max_header_field_bytes: int = 32_768
    """Maximum length of one header field, name and value. Longer ones get 431."""
    max_head_bytes: int = 65_536
    """Maximum size of the request line and all header fields together (64 KiB). Larger heads get 431. Nobody
    is authenticated before the head is complete, so `max_connections` times this is what strangers can make
    the gateway hold."""
    max_headers: int = 256
    """Maximum number of header fields of a request. More get 431."""
    max_connections: int | None = None
    """Maximum number of client connections; further ones get 503. Default: half of the remaining limit of
    open files, because each request may need a second descriptor for its backend."""
    keep_alive_timeout_s: float = 75.0
    """How long a connection may be idle between requests, and how long the head of a request may take to
    arrive after its first byte (then 408). The default is above the idle timeout of common load balancers
    (60 s), so that they close first."""
    body_idle_timeout_s: float = 60.0
    """How long a client may pause while it sends a request body. Then it gets 408."""
    body_min_bytes_per_s: int = 256
    """Minimum average rate at which a body must arrive after `body_idle_timeout_s`. Slower ones get 408."""
    write_stall_timeout_s: float = 120.0
    """How long a client may read nothing of a waiting response. Then it is disconnected."""
    write_buffer_bytes: int = 262_144
    """Response bytes that are buffered for a slow client before reading from its backend pauses."""
    unacknowledged_timeout_s: float = 120.0
    """How long sent bytes may stay unacknowledged, or a client's receive window closed, before the kernel
    drops the connection (Linux). This detects clients whose network is gone, which send no FIN. Idle clients
    are probed by TCP keep-alive after the same time."""
    linger_s: float = 2.0
    """How long the rest of a refused request is read and discarded, so that the client can read the error."""
    sse_keepalive_s: float | None = None
    """Send a comment whenever an event stream has been silent for almost this long, starting with the
    backend's response head. For load balancers with a short idle timeout. Default: no comments."""
    cors: CorsSettings | None = None
    """Which web pages may call the gateway from a browser, by HTTP or WebSocket. Default: backends decide."""
    probe_half_closed: bool = True
    """Whether a client that has closed its sending side may still get its answer. If false, the gateway
    treats it as disconnected."""

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
        for name in ("max_request_line_bytes", "max_header_field_bytes", "max_head_bytes"):
            if getattr(self, name) < 256:
                raise ValueError(f"{name} must be at least 256")
        if max(self.max_request_line_bytes, self.max_header_field_bytes) > self.max_head_bytes:
            raise ValueError(
                "max_head_bytes must not be less than max_request_line_bytes and max_header_field_bytes"
            )
        if self.linger_s < 0 or self.body_min_bytes_per_s < 0:
            raise ValueError("linger_s and body_min_bytes_per_s must not be negative")
