"""Options of discovery: which sources say what backends there are, beside the list `backends`.

A source says *where* engines are; all of its backends share the rest (engine, weight, key).
"""

from __future__ import annotations

import msgspec

from gateway.fleet.engine_metrics import DIALECTS


class DnsSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every address of a name is a backend: a headless service, or a round-robin record. Plain HTTP only,
    because a certificate names hosts and not addresses."""

    host: str
    """Name to resolve, such as `vllm-headless.models.svc.cluster.local`."""
    port: int = 8000
    """Port of every address."""
    engine: str = "vllm"
    """Engine kind of these backends, as in `backends`."""
    weight: float = 1.0
    """Weight of each of them."""
    labels: dict[str, str] = {}
    """Labels of each of them."""
    api_key_env: str | None = None
    """Environment variable with the key sent to each of them."""

    def __post_init__(self) -> None:
        _require_port(self.port)
        _check_shared(self.engine, self.weight)


class FileSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A YAML list of backends, each as in `backends`, read again when it changes."""

    path: str
    """The file."""


class KubernetesSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ready pods of a service, from the cluster's EndpointSlices, each under its pod's name.

    Needs a service account that may list `endpointslices` of group `discovery.k8s.io` in the namespace."""

    service: str
    """Name of the Kubernetes service."""
    namespace: str | None = None
    """The gateway's own namespace when absent."""
    port: int | None = None
    """Port of the pods; the first one of the service when absent."""
    engine: str = "vllm"
    """Engine kind of these backends, as in `backends`."""
    weight: float = 1.0
    """Weight of each of them."""
    labels: dict[str, str] = {}
    """Labels of each of them."""
    api_key_env: str | None = None
    """Environment variable with the key sent to each of them."""

    def __post_init__(self) -> None:
        if self.port is not None:
            _require_port(self.port)
        _check_shared(self.engine, self.weight)


class DiscoverySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Backends that come and go by themselves."""

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


def _require_port(port: int) -> None:
    if not 0 < port <= 65535:
        raise ValueError(f"port must be 1..65535, got {port}")


def _check_shared(engine: str, weight: float) -> None:
    """As for `backends`; found at start, not when the source first names somebody."""
    if engine not in DIALECTS:
        raise ValueError(f"engine {engine!r} is not one of {', '.join(DIALECTS)}")
    if not 0 <= weight <= 1000:
        raise ValueError(f"weight must be 0..1000, got {weight}")
