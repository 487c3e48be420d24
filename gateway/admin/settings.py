"""Options of the admin API: where it listens, its tokens, which hosts may become backends."""

from __future__ import annotations

import msgspec

from gateway.admin.backend_hosts import check_pattern
from gateway.downstream.tls import ListenerTls


class AdminSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The admin API. It listens on loopback by default. Without a token, only loopback clients may use it."""

    host: str = "127.0.0.1"
    """Address to listen on. Set a token before you use anything but loopback."""
    port: int = 8001
    """TCP port. With several worker processes, each uses the next port."""
    is_enabled: bool = True
    """Whether to open the admin listener."""
    tls: ListenerTls | None = None
    """Serve TLS on the admin listener. Default: plain HTTP."""
    token_env: str = "HOMING_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
    """Environment variable with the bearer token for reading and changing."""
    read_token_env: str = "HOMING_ADMIN_READ_TOKEN"  # noqa: S105 - the name of a variable
    """Environment variable with the bearer token for reading only."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that clients may use without a token, besides `localhost` and loopback addresses."""
    allow_backend_hosts: tuple[str, ...] = ("loopback", "private", "cluster")
    """Allowed hosts of backends that are added through the API: `loopback`, `private`, `cluster` (names that
    only a local resolver knows), CIDRs, or name patterns such as `*.gpu.example.com`. Backends in the
    configuration file may have any other host. The gateway never connects to metadata or link-local
    addresses."""
    key_hosts: dict[str, tuple[str, ...]] = {}
    """Additional hosts that an added backend's key may be sent to: variable → hosts, as in
    `allow_backend_hosts`. By default a key is sent only to hosts that `backends` uses it for."""
    journal_sessions: int = 5000
    """Number of sessions whose last turns and moves are kept in memory for `homing explain`. 0 keeps none."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0..65535, got {self.port}")
        if not 0 <= self.journal_sessions <= 1_000_000:
            raise ValueError(f"journal_sessions must be 0..1000000, got {self.journal_sessions}")
        for pattern in self.allow_backend_hosts:
            check_pattern("allow_backend_hosts", pattern)
        for variable, patterns in self.key_hosts.items():
            for pattern in patterns:
                check_pattern(f"key_hosts.{variable}", pattern)
