"""Limits and timeouts towards backends, and how TLS to them is verified.

Decision: every wait on a backend's socket has a bound, and none of them bounds a whole stream: a stream
may last for hours as long as bytes come. Knows nothing of pools or sockets.
"""

from __future__ import annotations

import msgspec


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How `https://` backends are verified, and the client certificate that they get."""

    ca_file: str | None = None
    """PEM file of trusted certificate authorities. Default: the system's."""
    client_cert_file: str | None = None
    """PEM file of the client certificate (chain), for backends that require one (mTLS)."""
    client_key_file: str | None = None
    """PEM file of the private key. Not needed if `client_cert_file` contains the key."""
    server_name: str | None = None
    """Name to send as SNI and to verify. Default: the host of the backend's URL."""
    verify: bool = True
    """False accepts any certificate. Use it only in a network that nobody else can reach."""

    def __post_init__(self) -> None:
        if self.client_key_file is not None and self.client_cert_file is None:
            raise ValueError("client_key_file needs client_cert_file")


class UpstreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the connections to backends. They apply to every backend."""

    connect_timeout_s: float = 2.0
    """Timeout for opening a TCP (and TLS) connection to a backend."""
    first_byte_timeout_s: float = 600.0
    """Timeout for the response head and the first byte of the body. It covers the engine's queue and the
    whole prefill, and the whole generation if the answer is not streamed."""
    idle_timeout_s: float = 300.0
    """Timeout between two reads of a response body. Time in which a slow client blocks the stream does not
    count."""
    unacknowledged_timeout_s: float = 60.0
    """How long sent bytes may stay unacknowledged, or a backend's receive window closed, before the kernel
    drops the connection (Linux). A backend that is silent, for example during a prefill, is probed by TCP
    keep-alive after the same time."""
    max_connections: int = 4096
    """Maximum number of connections to one backend, busy and idle. It only protects against running out of
    file descriptors: admission queues requests long before."""
    max_idle_connections: int = 256
    """Maximum number of idle connections to one backend."""
    idle_expiry_s: float = 4.0
    """How long an unused connection is kept. The default is below the keep-alive of engines (uvicorn: 5 s),
    so that the gateway closes first and no request is sent on a connection that is being closed."""
    max_response_header_bytes: int = 65_536
    """Maximum size of the reason phrase and of all names and values in the head of an answer."""
    max_response_headers: int = 256
    """Maximum number of header lines in the head of an answer."""
    max_early_body_bytes: int = 262_144
    """Maximum number of unread body bytes that are buffered. The rest waits in the kernel."""
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
