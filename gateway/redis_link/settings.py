"""Options of the connection to Redis. Secrets are named here and read from the environment.

Invariant: contradictory settings cannot be built; the error names the option.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from gateway.redis_link.secret import Secret


def require_positive(**options: float) -> None:
    for name, value in options.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be greater than 0, got {value}")


class RedisTlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """TLS to Redis, Sentinel or the Cluster nodes."""

    enabled: bool = False
    """Use TLS. A `rediss://` url turns it on too."""

    ca_file: str | None = None
    """PEM file of the certificate authorities to trust; the system's when absent."""

    cert_file: str | None = None
    """PEM file of the client certificate, if the server asks for one."""

    key_file: str | None = None
    """PEM file of the private key for `cert_file`."""

    check_hostname: bool = True
    """Require that the server's certificate matches the host name."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file must be given together")


class RedisSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where Redis is, how long a request may wait for it, and how much of it is cached in this process.

    Give one of `url` (one server), `sentinels` with `sentinel_service`, or `cluster_nodes`. With none of
    them the url comes from the environment variable `url_env`, or else is `redis://127.0.0.1:6379/0`.
    """

    url: str | None = None
    """`redis://host:port/db`, `rediss://…` with TLS, or `unix:///path`. Must not contain a password."""

    url_env: str = "REDIS_URL"
    """Environment variable with the url, used when no server is given here; it may contain a password."""

    sentinels: tuple[str, ...] = ()
    """`host:port` of each Sentinel."""

    sentinel_service: str = "mymaster"
    """Name of the service that the Sentinels monitor."""

    cluster_nodes: tuple[str, ...] = ()
    """`host:port` of some Cluster nodes; the rest are discovered."""

    database: int = 0
    """Database number behind Sentinels; a url names its own, and a Cluster has only 0."""

    username: str | None = None
    """ACL user; the default user when absent."""

    password_env: str = "HOMING_REDIS_PASSWORD"  # noqa: S105 - a name, not a password
    """Environment variable that holds the password; no password when empty or unset."""

    sentinel_password_env: str = "HOMING_REDIS_SENTINEL_PASSWORD"  # noqa: S105 - a name
    """Environment variable that holds the password for the Sentinels themselves."""

    tls: RedisTlsSettings = RedisTlsSettings()

    key_prefix: str = "homing"
    """First part of every key and channel, so that separate gateways can share one Redis."""

    budget_ms: float = 50.0
    """Longest time that one request may wait for answers of Redis, over all its calls. Only time in which
    Redis owes an answer counts, not the gateway's own queue or a busy event loop."""

    socket_timeout_ms: float = 1000.0
    """Timeout of a command or connection attempt itself. Requests wait only for `budget_ms`, but opening a
    connection may take longer than that (TLS, a distant server). It also bounds a request's whole wait,
    including that for one of `pool_size` places."""

    pool_size: int = 16
    """Most commands in flight at once; further ones wait while Redis answers."""

    local_max_sessions: int = 200_000
    """Most bindings cached in this process, so that turns of bound sessions need no round trip."""

    local_ttl_s: float = 30.0
    """How long a cached binding is trusted while invalidations from other replicas cannot be received."""

    heartbeat_interval_ms: float = 1000.0
    """How often the invalidation channel is tested end to end; after three intervals without an answer it
    counts as broken. Also how often an unreachable Redis is tried again, and how often connections are opened
    anew while the server says that another should be asked."""

    flush_interval_ms: float = 200.0
    """How often pending renewals are sent, in batches."""

    max_pending_renewals: int = 100_000
    """Most renewals kept while Redis is unavailable; beyond that the oldest are dropped and counted."""

    breaker_failures: int = 3
    """After this many failures in a row Redis is not asked until a probe succeeds."""

    def __post_init__(self) -> None:
        require_positive(
            budget_ms=self.budget_ms,
            socket_timeout_ms=self.socket_timeout_ms,
            pool_size=self.pool_size,
            local_max_sessions=self.local_max_sessions,
            local_ttl_s=self.local_ttl_s,
            heartbeat_interval_ms=self.heartbeat_interval_ms,
            flush_interval_ms=self.flush_interval_ms,
            max_pending_renewals=self.max_pending_renewals,
            breaker_failures=self.breaker_failures,
        )
        if (self.url is not None) + bool(self.sentinels) + bool(self.cluster_nodes) > 1:
            raise ValueError("give only one of url, sentinels and cluster_nodes")
        if self.url is not None and urlsplit(self.url).password:
            raise ValueError(f"url must not contain a password: put it into the variable {self.password_env}")
        if not self.key_prefix or set("{} \n\r\t*?[]\\") & set(self.key_prefix):
            raise ValueError("key_prefix must not be empty or contain blanks, braces or pattern characters")
        for address in (*self.sentinels, *self.cluster_nodes):
            parse_address(address)

    def resolved_url(self, environ: Mapping[str, str] = os.environ) -> Secret:
        """Return the url to use when neither Sentinels nor Cluster nodes are configured."""
        return Secret(self.url or environ.get(self.url_env) or "redis://127.0.0.1:6379/0")

    def password(self, environ: Mapping[str, str] = os.environ) -> Secret:
        return Secret(environ.get(self.password_env, ""))

    def sentinel_password(self, environ: Mapping[str, str] = os.environ) -> Secret:
        return Secret(environ.get(self.sentinel_password_env, ""))


def parse_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`. Raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)
