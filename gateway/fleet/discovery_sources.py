"""Sources of backends: a DNS name, a file, the EndpointSlices of a Kubernetes service.

A source returns backends as in the configuration, or raises `SourceUnavailable`. An empty answer is an error
too, because a headless service without pods and a broken resolver look alike; only a file may contain an
empty list. Sources keep no state and do not touch the fleet.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec
import yaml

from gateway.fleet.settings import (
    BACKEND_ID_PATTERN,
    BackendSettings,
    DiscoverySettings,
    DnsSource,
    FileSource,
    KubernetesSource,
)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SLICES_PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

Resolve = Callable[[str, int], Awaitable[list[Any]]]
"""Resolves host and port to rows as `socket.getaddrinfo` returns them."""


class SourceUnavailable(Exception):
    """The source cannot list its backends at the moment."""


class Source(Protocol):
    """Safe to cancel."""

    @property
    def name(self) -> str: ...

    async def find(self) -> list[BackendSettings]:
        """Return all its backends. Raises SourceUnavailable."""
        ...


def make_sources(settings: DiscoverySettings, environ: Mapping[str, str] = os.environ) -> list[Source]:
    """Create the configured sources, in order."""
    return [
        *(DnsLookup(source) for source in settings.dns),
        *(BackendFile(source) for source in settings.files),
        *(EndpointSlices(source, environ) for source in settings.kubernetes),
    ]


class DnsLookup:
    """Each address of a name. If a name has both kinds, only IPv4: a dual-stack pod is one backend."""

    def __init__(self, source: DnsSource, resolve: Resolve | None = None) -> None:
        self.name = f"dns:{source.host}"
        self._source = source
        self._resolve = resolve or _system_resolver

    async def find(self) -> list[BackendSettings]:
        try:
            rows = await self._resolve(self._source.host, self._source.port)
        except OSError as error:
            raise SourceUnavailable(f"cannot resolve {self._source.host}: {error.strerror}") from error
        addresses = {family: {row[4][0] for row in rows if row[0] is family} for family in _FAMILIES}
        chosen = addresses[socket.AF_INET] or addresses[socket.AF_INET6]
        if not chosen:
            raise SourceUnavailable(f"{self._source.host} has no address")
        return [_backend_at(address, self._source.port, self._source) for address in sorted(chosen)]


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


async def _system_resolver(host: str, port: int) -> list[Any]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


class BackendFile:
    """A YAML list of backends. A file that is incomplete or invalid is an unavailable source."""

    def __init__(self, source: FileSource) -> None:
        self.name = f"file:{source.path}"
        self._path = Path(source.path)

    async def find(self) -> list[BackendSettings]:
        try:
            text = await asyncio.to_thread(self._path.read_text, encoding="utf-8")
            return msgspec.convert(yaml.safe_load(text), list[BackendSettings])
        except OSError as error:
            raise SourceUnavailable(f"cannot read {self._path}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
            raise SourceUnavailable(f"{self._path}: {' '.join(str(error).split())}") from error


class _Named(msgspec.Struct):
    name: str


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None  # absent means ready, says the API reference


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Conditions = _Conditions()
    targetRef: _Named | None = None  # noqa: N815 - the API's own names


class _Port(msgspec.Struct):
    port: int | None = None


class _Slice(msgspec.Struct):
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None
    addressType: str = "IPv4"  # noqa: N815


class _SliceList(msgspec.Struct):
    items: list[_Slice]


class EndpointSlices:
    """The ready pods of a service, each with its pod's name. A terminating pod is not ready.

    The token is read for each request, because the cluster rotates the file about hourly.
    """

    def __init__(
        self,
        source: KubernetesSource,
        environ: Mapping[str, str] = os.environ,
        account: Path = SERVICE_ACCOUNT,
        api_url: str | None = None,
    ) -> None:
        self.name = f"kubernetes:{source.service}"
        self._source, self._account = source, account
        host = environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
        host = f"[{host}]" if ":" in host else host
        self._api_url = api_url or f"https://{host}:{environ.get('KUBERNETES_SERVICE_PORT', '443')}"

    async def find(self) -> list[BackendSettings]:
        try:
            slices = await self._list()
        except (httpx.HTTPError, OSError, msgspec.DecodeError) as error:
            raise SourceUnavailable(f"the Kubernetes API: {error or type(error).__name__}") from error
        slices.sort(key=lambda part: part.addressType, reverse=True)  # for a dual-stack pod, IPv4 wins
        found = {backend.backend_id: backend for part in slices for backend in self._ready_pods(part)}
        if not found:
            raise SourceUnavailable(f"service {self._source.service} has no ready pod")
        return list(found.values())

    async def _list(self) -> list[_Slice]:
        token = await self._read("token")
        namespace = self._source.namespace or await self._read("namespace")
        authority = await asyncio.to_thread(self._trust) if self._api_url.startswith("https:") else False
        async with httpx.AsyncClient(base_url=self._api_url, verify=authority, trust_env=False) as client:
            answer = await client.get(
                SLICES_PATH.format(namespace=namespace),
                params={"labelSelector": f"kubernetes.io/service-name={self._source.service}"},
                headers={"authorization": f"Bearer {token}"},
            )
            answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=_SliceList).items

    async def _read(self, name: str) -> str:
        return (await asyncio.to_thread((self._account / name).read_text)).strip()

    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self._account / "ca.crt"))

    def _ready_pods(self, part: _Slice) -> list[BackendSettings]:
        port = self._source.port or next((entry.port for entry in part.ports or () if entry.port), None)
        if port is None or part.addressType not in ("IPv4", "IPv6"):
            return []
        return [
            _backend_at(endpoint.addresses[0], port, self._source, endpoint.targetRef)
            for endpoint in part.endpoints or ()
            if endpoint.addresses and endpoint.conditions.ready is not False
        ]


def _backend_at(
    address: str, port: int, source: DnsSource | KubernetesSource, pod: _Named | None = None
) -> BackendSettings:
    host = f"[{address}]" if ":" in address else address
    return BackendSettings(
        id=pod.name if pod is not None and BACKEND_ID_PATTERN.match(pod.name) else None,
        url=f"http://{host}:{port}",
        engine=source.engine,
        weight=source.weight,
        labels=source.labels,
        api_key_env=source.api_key_env,
    )
