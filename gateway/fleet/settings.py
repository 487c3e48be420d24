"""Options of the fleet: its backends, the sources that discover more of them, and how engines are scraped.

A leaf module: `gateway.config` puts these sections together with those of the other packages.
"""

from __future__ import annotations

import re

import msgspec

from gateway.upstream.address import parse_base_url
from gateway.values import MAX_NAME_LENGTH, NAME_CHARACTERS, NAME_PATTERN, Backend, BackendId

BACKEND_ID_PATTERN = re.compile(rf"{NAME_PATTERN}\Z")
ENGINES = ("torch", "vllm", "sglang", "llamacpp", "trtllm", "openai")
"""Known engine kinds; `engine_metrics.DIALECTS` has an entry for each."""
MAX_WEIGHT = 1000.0


MAX_RANKS = 1_024


class BackendSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One backend of the fleet."""

    url: str
    """Base URL, `http://host:port`, `https://…` or `unix:/path/to.sock`; a trailing `/v1` is ignored."""
    id: str | None = None
    """Stable name; derived from host and port when absent."""
    engine: str = "openai"
    """torch, vllm, sglang, llamacpp, trtllm or openai: selects the health path and the metric names."""
    weight: float = 1.0
    """Share of new sessions relative to the other backends; 0 takes none."""
    kv_capacity_tokens: int | None = None
    """KV cache size in tokens; read from the engine's metrics when absent."""
    data_parallel_rank: int | None = None
    """Which rank of an engine with several (vLLM's `--data-parallel-size`) this is: it is sent as
    `x-data-parallel-rank`. Each rank has a cache of its own, so each is a backend; they share a URL."""
    labels: dict[str, str] = {}
    """Your own names and values, shown by the admin API."""
    api_key_env: str | None = None
    """Environment variable that holds the key sent to this backend instead of the client's."""

    def __post_init__(self) -> None:
        if not BACKEND_ID_PATTERN.match(self.backend_id):
            if self.id is None:
                raise ValueError(f"no name can be made of {self.url!r}: give the backend an id")
            raise ValueError(
                f"id {self.id!r} must match [A-Za-z0-9][{NAME_CHARACTERS}]* and have at most "
                f"{MAX_NAME_LENGTH} characters"
            )
        normalise_backend_url(self.url)
        _check_engine_and_weight(self.engine, self.weight)
        if self.data_parallel_rank is not None and not 0 <= self.data_parallel_rank < MAX_RANKS:
            raise ValueError(f"data_parallel_rank must be from 0 to {MAX_RANKS - 1}")

    @property
    def backend_id(self) -> str:
        if self.id is not None:
            return self.id
        place = normalise_backend_url(self.url).partition(":")[2]
        rank = "" if self.data_parallel_rank is None else f"-r{self.data_parallel_rank}"
        name = re.sub(rf"[^{NAME_CHARACTERS}]+", "-", place).strip("-._")
        return name[: MAX_NAME_LENGTH - len(rank)] + rank


def normalise_backend_url(url: str) -> str:
    """Return one spelling per backend: `HTTP://A:80/` and `http://a` are the same. Raises ValueError."""
    address = parse_base_url(url.strip().removesuffix("/").removesuffix("/v1"))
    if address.unix_path is not None:
        return f"unix:{address.unix_path}"
    scheme = "https" if address.is_tls else "http"
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{scheme}://{host}:{address.port}{address.path_prefix.decode()}"


def backend_of(settings: BackendSettings) -> Backend:
    """Return the fleet's value for a configured backend, its URL normalised."""
    return Backend(
        backend_id=BackendId(settings.backend_id),
        base_url=normalise_backend_url(settings.url),
        engine=settings.engine,
        rank=settings.data_parallel_rank,
        weight=settings.weight,
        kv_capacity_tokens=settings.kv_capacity_tokens,
        labels=dict(settings.labels),
    )


# -- discovery: a source says where engines are; its backends share engine, weight, labels and key


class DnsSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every address of a DNS name is a backend: a headless service or a round-robin record. Plain HTTP only,
    because certificates name hosts, not addresses."""

    host: str
    """Name to resolve, such as `vllm-headless.models.svc.cluster.local`."""
    port: int = 8000
    """Port on every address."""
    engine: str = "vllm"
    """Engine kind of these backends, as in `backends`."""
    weight: float = 1.0
    """Weight of each backend."""
    labels: dict[str, str] = {}
    """Labels of each backend."""
    api_key_env: str | None = None
    """Environment variable that holds the key sent to each backend."""

    def __post_init__(self) -> None:
        _check_port(self.port)
        _check_engine_and_weight(self.engine, self.weight)


class FileSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A YAML list of backends, each as in `backends`, read again when it changes."""

    path: str
    """The file."""


class KubernetesSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ready pods of a service, from the cluster's EndpointSlices; each backend has its pod's name.

    Needs a service account that may list `endpointslices` of group `discovery.k8s.io` in the namespace."""

    service: str
    """Name of the Kubernetes service."""
    namespace: str | None = None
    """The gateway's own namespace when absent."""
    port: int | None = None
    """Port of the pods; the service's first port when absent."""
    engine: str = "vllm"
    """Engine kind of these backends, as in `backends`."""
    weight: float = 1.0
    """Weight of each backend."""
    labels: dict[str, str] = {}
    """Labels of each backend."""
    api_key_env: str | None = None
    """Environment variable that holds the key sent to each backend."""

    def __post_init__(self) -> None:
        if self.port is not None:
            _check_port(self.port)
        _check_engine_and_weight(self.engine, self.weight)


class DiscoverySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sources of backends that come and go without a change of the configuration."""

    dns: tuple[DnsSource, ...] = ()
    files: tuple[FileSource, ...] = ()
    kubernetes: tuple[KubernetesSource, ...] = ()
    interval_s: float = 5.0
    """How often the sources are asked."""
    timeout_s: float = 5.0
    """Longest wait for one answer."""

    @property
    def has_sources(self) -> bool:
        return bool(self.dns or self.files or self.kubernetes)

    def __post_init__(self) -> None:
        if min(self.interval_s, self.timeout_s) <= 0:
            raise ValueError("interval_s and timeout_s must be above 0")


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scrapes, drains and discovery."""

    scrape_limit_bytes: int = 8 * 1024 * 1024
    """Most bytes read of a backend's metrics page or model list."""
    drain_deadline_s: float = 600.0
    """Default time after which a drained backend's remaining bindings are dropped."""
    prewarm_sessions: int = 0
    """How many of a drained backend's largest sessions are recomputed on their new homes before their next
    turn. 0 turns it off. While on, the last request of each recent session is kept in memory."""
    prewarm_memory_bytes: int = 64 * 1024 * 1024
    """Most memory for those requests; the least recently used go first."""
    prewarm_per_s: float = 2.0
    """Replays per second: they compete with live requests on the new homes."""
    order_lifetime_s: float = 604_800.0
    """How long an order about a backend is remembered when no gateway has the backend and no file or source
    names it; a gateway that was cut off for longer may bring an older order back. Orders about other backends
    do not end."""
    discovery: DiscoverySettings = DiscoverySettings()
    """Sources of backends that come and go by themselves, in addition to the list `backends`."""

    def __post_init__(self) -> None:
        if self.drain_deadline_s < 0:
            raise ValueError("drain_deadline_s must be at least 0")
        if not 60 <= self.order_lifetime_s <= 1e9:
            raise ValueError(f"order_lifetime_s must be 60..1e9, got {self.order_lifetime_s:g}")
        if min(self.prewarm_sessions, self.prewarm_memory_bytes) < 0 or self.prewarm_per_s <= 0:
            raise ValueError("prewarm options must not be negative, and prewarm_per_s must be above 0")


def _check_port(port: int) -> None:
    if not 0 < port <= 65535:
        raise ValueError(f"port must be 1..65535, got {port}")


def _check_engine_and_weight(engine: str, weight: float) -> None:
    """Checked for sources too, so that a mistake is found at start and not when backends appear."""
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
    if not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight must be 0..1000, got {weight}")
