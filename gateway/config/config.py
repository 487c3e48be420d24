"""The configuration: one YAML file, parsed once into frozen structs and passed down explicitly.

Each package declares its section beside the code that uses it. This package imports all of them, so no other
package except `process` and `commands` may import it: they are handed the settings that they need.

This module reads the file, takes secrets from the environment, and turns every mistake into one line with its
path. Unknown keys are errors: a misspelt option that is ignored would be noticed only in production.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gateway.admin.settings import AdminSettings
from gateway.config.file_watch import ReloadSettings
from gateway.config.mistakes import explain
from gateway.downstream.settings import DownstreamSettings
from gateway.downstream.tls import ListenerTls
from gateway.fleet.settings import ENGINES, BackendSettings, FleetSettings, normalise_backend_url
from gateway.limits.settings import LimitSettings
from gateway.request.tracing import TracingSettings
from gateway.routing.failover import FailoverSettings
from gateway.routing.health import HealthSettings
from gateway.routing.key_watch import KeyWatchSettings
from gateway.routing.settings import RoutingSettings
from gateway.sessions.settings import SessionsSettings
from gateway.tenants.settings import AuthenticationSettings, TenantSettings, check_proofs, must_authenticate
from gateway.upstream.settings import UpstreamSettings
from gateway.wire.cache_salt import parse_salted
from gateway.wire.routes import check_passthrough
from gateway.wire.settings import HeaderSettings, KeySettings

DEFAULT_KEY_SECRET = "homing-default-key-secret"  # noqa: S105 - public on purpose, see `key_secret`


class ConfigError(Exception):
    """The configuration is invalid; the text says where the mistake is and how to fix it."""


class Listen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where clients connect."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` or `::` for all interfaces."""
    port: int = 8000
    """TCP port; 0 chooses a free port."""
    unix_path: str | None = None
    """Listen on this Unix socket instead of host and port."""
    tls: ListenerTls | None = None
    """Serve TLS to clients. Default: plain HTTP."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0..65535, got {self.port}")


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is logged, as JSON lines on standard error."""

    level: str = "info"
    """debug, info, warning or error."""
    access: bool = True
    """Log one line per request, without prompts, keys or raw session ids."""

    def __post_init__(self) -> None:
        if self.level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"level must be debug, info, warning or error, got {self.level!r}")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration of a gateway process."""

    listen: Listen = Listen()
    admin: AdminSettings = AdminSettings()
    backends: tuple[BackendSettings, ...] = ()
    keys: KeySettings = KeySettings()
    headers: HeaderSettings = HeaderSettings()
    key_watch: KeyWatchSettings = KeyWatchSettings()
    routing: RoutingSettings = RoutingSettings()
    sessions: SessionsSettings = SessionsSettings()
    health: HealthSettings = HealthSettings()
    failover: FailoverSettings = FailoverSettings()
    fleet: FleetSettings = FleetSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    downstream: DownstreamSettings = DownstreamSettings()
    limits: LimitSettings = LimitSettings()
    authentication: AuthenticationSettings = AuthenticationSettings()
    tenants: tuple[TenantSettings, ...] = ()
    """Who may use this gateway. Everybody, if there are no tenants and no other authentication is
    configured."""
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    passthrough_paths: tuple[str, ...] = ()
    """Additional paths that are forwarded to a backend: `/v1/images`, or `/v1/images/*` for all paths below
    it. They are routed by session headers, and by the `model` in a JSON object or form where a
    backend serves it; clients can use whatever the engine serves there."""
    reload: ReloadSettings = ReloadSettings()
    workers: int = 1
    """Number of gateway processes that share the port. More than one needs `sessions.store: redis`."""
    leaving_notice_s: float = 5.0
    """How long after SIGTERM the gateway still takes connections and serves, while `/readyz` says that it
    leaves, so that balancers notice before they meet a closed port: longer than a balancer's probe interval
    times the failures that it waits for. Where something else holds traffic off before SIGTERM (Kubernetes
    with a `preStop` delay) it may be 0. Not used for SIGINT (Ctrl-C)."""
    drain_timeout_s: float = 30.0
    """How long running requests may continue after the notice."""

    def __post_init__(self) -> None:
        for path in self.passthrough_paths:
            check_passthrough(path)
        seen_ids: set[str] = set()
        seen_urls: dict[tuple[str, int | None], str] = {}
        for backend in self.backends:
            url = normalise_backend_url(backend.url), backend.data_parallel_rank
            if backend.backend_id in seen_ids:
                raise ValueError(f"two backends have the id {backend.backend_id!r}")
            if url in seen_urls:
                raise ValueError(f"backends {seen_urls[url]!r} and {backend.backend_id!r} have the same url")
            seen_ids.add(backend.backend_id)
            seen_urls[url] = backend.backend_id
        tls = self.listen.tls
        check_proofs(
            self.tenants,
            self.authentication,
            asks_for_certificates=tls is not None and tls.client_ca_file is not None,
        )
        for name in self.authentication.also_salted:
            if parse_salted(name)[0] not in ENGINES:
                raise ValueError(f"authentication.also_salted: no engine is named as in {name!r}")
        if self.authentication.keys_in_redis and self.sessions.store != "redis":
            raise ValueError("authentication.keys_in_redis needs sessions.store: redis")
        if self.workers < 1:
            raise ValueError("workers must be at least 1")
        if self.workers > 1 and self.sessions.store != "redis":
            raise ValueError("workers above 1 need a shared session store: set sessions.store: redis")
        if self.workers > 1 and self.listen.unix_path is not None:
            raise ValueError("workers above 1 need a TCP port: listen.unix_path allows only one process")

    @property
    def passes_client_credentials(self) -> bool:
        """Whether all credentials are forwarded: they are meant for backends where we ask for none."""
        return not must_authenticate(self.tenants, self.authentication)

    @property
    def passes_client_key(self) -> bool:
        """Whether the credential that proved the client's tenant is forwarded, and no other."""
        return self.authentication.passes_client_key


def load_config(path: Path | None) -> Config:
    """Read the file, or use the defaults without one. Raises ConfigError."""
    if path is None:
        return parse_config({})
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}. Set --config to an existing file."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        data = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - derives from SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}") from error
    try:
        return parse_config({} if data is None else data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(data: Any) -> Config:
    """Validate parsed YAML. Raises ConfigError with the path of the offending key."""
    try:
        return msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(Config, str(error))) from error


def key_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the secret of the HMAC on session ids. All replicas need the same one.

    The default is public: placement works and replicas agree, but anyone who can read the store can test
    guesses of short session ids. Set HOMING_KEY_SECRET in production.
    """
    return (environ.get("HOMING_KEY_SECRET") or DEFAULT_KEY_SECRET).encode()


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, which YAML forbids and PyYAML silently accepts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def _one_line(error: Exception) -> str:
    """Return PyYAML's message on one line, without its placeholder for a file name."""
    return " ".join(str(error).replace(' in "<unicode string>",', " at").split())
