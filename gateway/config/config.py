"""The configuration: one YAML file, parsed once into frozen structs and passed down explicitly.

Each package declares its own section beside the code that obeys it; this file puts them together, reads
the file, takes secrets from the environment, and turns every mistake into one line with its path.
Unknown keys are errors: a misspelt option that is silently ignored is found out in production.
"""

from __future__ import annotations

import os
import re
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
from gateway.fleet.engine_metrics import DIALECTS
from gateway.fleet.settings import FleetSettings
from gateway.limits.settings import LimitSettings
from gateway.request.tracing import TracingSettings
from gateway.routing.failover import FailoverSettings
from gateway.routing.health import HealthSettings
from gateway.routing.key_watch import KeyWatchSettings
from gateway.routing.settings import RoutingSettings
from gateway.sessions.settings import SessionsSettings
from gateway.tenants.settings import AuthenticationSettings, TenantSettings, check_ways_in, must_authenticate
from gateway.upstream.address import parse_base_url
from gateway.upstream.settings import UpstreamSettings
from gateway.wire.routes import check_passthrough
from gateway.wire.settings import HeaderSettings, KeySettings

BACKEND_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
DEFAULT_KEY_SECRET = "homing-default-key-secret"  # noqa: S105 - public on purpose, see `Config.key_secret`


class ConfigError(Exception):
    """The configuration is invalid; the text says where the mistake is and how to fix it."""


class Listen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where clients reach the gateway."""

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


class BackendSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One backend of the fleet."""

    url: str
    """Base URL, `http://host:port`, `https://…` or `unix:/path/to.sock`; a closing `/v1` is ignored."""
    id: str | None = None
    """Stable name; made from host and port when absent."""
    engine: str = "openai"
    """torch, vllm, sglang, llamacpp, trtllm or openai: decides health path and metric names."""
    weight: float = 1.0
    """Share of new sessions relative to the others; 0 takes none."""
    kv_capacity_tokens: int | None = None
    """KV cache size in tokens; read from the engine's metrics when absent."""
    labels: dict[str, str] = {}
    """Names and values of your own, shown by the admin API."""
    api_key_env: str | None = None
    """Environment variable with the key sent to this backend instead of the client's."""

    def __post_init__(self) -> None:
        normalise_backend_url(self.url)
        if self.id is not None and not BACKEND_ID_PATTERN.match(self.id):
            raise ValueError(f"id {self.id!r} must match [A-Za-z0-9][A-Za-z0-9._-]* and be at most 64 long")
        if self.engine not in ENGINES:
            raise ValueError(f"engine {self.engine!r} is not one of {', '.join(ENGINES)}")
        if not 0 <= self.weight <= 1000:
            raise ValueError(f"weight must be 0..1000, got {self.weight}")

    @property
    def backend_id(self) -> str:
        if self.id is not None:
            return self.id
        place = normalise_backend_url(self.url).partition(":")[2]
        return re.sub(r"[^A-Za-z0-9._-]+", "-", place).strip("-._")[:64]


ENGINES = tuple(DIALECTS)


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is logged, as JSON lines on standard error."""

    level: str = "info"
    """debug, info, warning or error."""
    access: bool = True
    """One line per request, without prompts, keys or raw session ids."""

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
    """Additional paths that are forwarded to a backend: `/v1/files`, or `/v1/files/*` for all paths below it.
    They are routed by session headers only, and clients can use whatever the engine serves there."""
    reload: ReloadSettings = ReloadSettings()
    workers: int = 1
    """Number of gateway processes that share the port. More than one needs `sessions.store: redis`."""
    drain_timeout_s: float = 30.0
    """How long running requests may continue after SIGTERM."""

    def __post_init__(self) -> None:
        for path in self.passthrough_paths:
            check_passthrough(path)
        seen_ids: set[str] = set()
        seen_urls: dict[str, str] = {}
        for backend in self.backends:
            url = normalise_backend_url(backend.url)
            if backend.backend_id in seen_ids:
                raise ValueError(f"two backends have the id {backend.backend_id!r}")
            if url in seen_urls:
                raise ValueError(f"backends {seen_urls[url]!r} and {backend.backend_id!r} have the same url")
            seen_ids.add(backend.backend_id)
            seen_urls[url] = backend.backend_id
        tls = self.listen.tls
        check_ways_in(
            self.tenants,
            self.authentication,
            asks_for_certificates=tls is not None and tls.client_ca_file is not None,
        )
        if self.authentication.keys_in_redis and self.sessions.store != "redis":
            raise ValueError("authentication.keys_in_redis needs sessions.store: redis")
        if self.workers < 1:
            raise ValueError("workers must be at least 1")
        if self.workers > 1 and self.sessions.store != "redis":
            raise ValueError("workers above 1 need a session table they can share: set sessions.store: redis")
        if self.workers > 1 and self.listen.unix_path is not None:
            raise ValueError("workers above 1 share a TCP port: listen.unix_path takes one process")

    @property
    def passes_client_credentials(self) -> bool:
        """Whether clients' credentials are forwarded to backends. Always, if the gateway requires none."""
        return self.authentication.passes_client_key or not must_authenticate(
            self.tenants, self.authentication
        )


def normalise_backend_url(url: str) -> str:
    """One spelling per backend: `HTTP://A:80/` and `http://a` are one. Raises ValueError with the reason."""
    address = parse_base_url(url.strip().removesuffix("/").removesuffix("/v1"))
    if address.unix_path is not None:
        return f"unix:{address.unix_path}"
    scheme = "https" if address.is_tls else "http"
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{scheme}://{host}:{address.port}{address.path_prefix.decode()}"


def load_config(path: Path | None) -> Config:
    """Read the file (or take the defaults). Raises ConfigError."""
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
    """Secret of the HMAC on session ids. All replicas need the same one.

    The default is public: placement works and replicas agree, but whoever reads the store could test
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
