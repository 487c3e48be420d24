"""Limits and timeouts towards backends, and how TLS to them is verified.

Decision: every wait on a backend's socket has a bound, and none of them bounds a whole stream: a stream
may last for hours as long as bytes come. Knows nothing of pools or sockets.
"""

from __future__ import annotations

import msgspec


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an `https://` backend is verified and how we identify ourselves to it."""

    ca_file: str | None = None
    """PEM file of the authorities to trust; the system's own when absent."""
    client_cert_file: str | None = None
    """PEM file of our certificate (chain), for backends that ask for one (mTLS)."""
    client_key_file: str | None = None
    """PEM file of our private key; absent when it is inside `client_cert_file`."""
    server_name: str | None = None
    """Name to send as SNI and to verify; the host of the backend's URL when absent."""
    verify: bool = True
    """False accepts any certificate. Only for a network nobody else can reach."""

    def __post_init__(self) -> None:
        if self.client_key_file is not None and self.client_cert_file is None:
            raise ValueError("client_key_file needs client_cert_file")


class UpstreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the connections to backends; the same for each backend."""

    connect_timeout_s: float = 2.0
    """Longest wait for a TCP (and TLS) connection to a backend."""
    first_byte_timeout_s: float = 600.0
    """Longest wait for a complete response head: covers the engine's queue and the whole prefill, and for
    an answer without streaming the whole generation."""
    idle_timeout_s: float = 300.0
    """Longest silence between two reads of a response body. Time in which a slow client holds the
    stream back does not count."""
    unacknowledged_timeout_s: float = 60.0
    """How long sent bytes may stay unacknowledged, or a backend's receive window closed, before the kernel
    counts its machine as lost (Linux). A silent one, in the middle of a prefill, is probed by TCP
    keep-alive after the same time."""
    max_connections: int = 4096
    """Most connections to one backend, busy and idle. A backstop against running out of file descriptors:
    admission queues requests long before."""
    max_idle_connections: int = 256
    """Most connections kept open to one backend without a request."""
    idle_expiry_s: float = 4.0
    """How long an unused connection is kept. Shorter than the keep-alive of the engine (uvicorn: 5 s), so
    that we close first and no request meets a connection that is just being closed."""
    max_response_header_bytes: int = 65_536
    """Most bytes of names and values in the head of one answer."""
    max_response_headers: int = 256
    """Most header lines in the head of one answer."""
    max_early_body_bytes: int = 262_144
    """Body bytes that may be held before somebody takes them; more wait in the kernel."""
    tls: TlsSettings = TlsSettings()
    """For `https://` backends."""

    def __post_init__(self) -> None:
        for name in (
            "connect_timeout_s",
            "first_byte_timeout_s",
            "idle_timeout_s",
            "idle_expiry_s",
            "unacknowledged_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0")
        for name in ("max_connections", "max_response_header_bytes", "max_response_headers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_idle_connections < 0:
            raise ValueError("max_idle_connections must not be negative")
