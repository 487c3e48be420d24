"""Options of the admin API: where it listens, whose tokens it takes, which hosts may become backends."""

from __future__ import annotations

import msgspec

from gateway.admin.backend_hosts import check_pattern
from gateway.downstream.tls import ListenerTls


class AdminSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The admin API. It listens on loopback; with no token, only loopback may use it."""

    host: str = "127.0.0.1"
    """Address to listen on; give it a token before you leave loopback."""
    port: int = 8001
    """TCP port; with several worker processes each takes the next one."""
    is_enabled: bool = True
    """Whether there is an admin listener at all."""
    tls: ListenerTls | None = None
    """Speak TLS on the admin listener; plain HTTP when absent."""
    token_env: str = "HOMING_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
    """Environment variable that holds the bearer token of those who may read and change."""
    read_token_env: str = "HOMING_ADMIN_READ_TOKEN"  # noqa: S105 - the name of a variable
    """Environment variable that holds the bearer token of those who may only read."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which the API may be asked without a token, beside `localhost` and loopback addresses."""
    allow_backend_hosts: tuple[str, ...] = ("loopback", "private", "cluster")
    """Hosts that a backend added through the API may have: `loopback`, `private`, `cluster` (names that
    only a local resolver knows), CIDRs, or name patterns such as `*.gpu.example.com`. Metadata and
    link-local addresses never, and no backend is dialled at one. Else the configuration file may name any."""
    key_hosts: dict[str, tuple[str, ...]] = {}
    """Where an added backend may take a key to: variable → hosts, as in `allow_backend_hosts`. Without it
    a key goes only to hosts that `backends` uses it for."""
    journal_sessions: int = 5000
    """Sessions whose last turns and moves are kept in memory, for those who ask why; 0: none."""

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
