"""Which hosts a backend that is added through the API may have.

Whoever may add backends chooses where the gateway sends requests, prompts and probes. A stolen admin token
must not give access to the metadata service of the gateway's network. The check runs once, when a backend is
added: it matches the host's name and every address that the name resolves to *now*. Whoever runs the DNS can
change the addresses later. `upstream.forbidden_peer` checks again at each connection, but only for metadata
addresses, so allow only names that you trust.

Invariant: link-local and other metadata addresses are refused whatever the patterns say, in every spelling
(mapped into IPv6, as a single number, through a name).
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from gateway.errors import BadRequest
from gateway.upstream.address import parse_base_url
from gateway.upstream.forbidden_peer import Address, is_forbidden, without_wrapping

RESOLVE_TIMEOUT_S = 3.0

_WORDS = frozenset(("loopback", "private", "cluster"))
_CLUSTER_SUFFIXES = (".local", ".internal", ".svc", ".lan", ".home.arpa", ".localdomain")
_PATTERN = re.compile(r"[A-Za-z0-9.*?_-]{1,253}\Z")
_NUMBER_LABEL = re.compile(r"(?:0[xX][0-9a-fA-F]*|[0-9]+)\Z")
_METADATA_NAMES = frozenset(
    (
        "api.metadata.cloud.ibm.com",
        "instance-data",
        "metadata",
        "metadata.google.internal",
        "metadata.packet.net",
        "metadata.platformequinix.com",
        "metadata.tencentyun.com",
    )
)
_SHARED_NET = ipaddress.ip_network("100.64.0.0/10")  # carriers and overlay networks; not `is_private`


def check_pattern(option: str, pattern: str) -> None:
    """Raise ValueError, naming the option, unless `pattern` is a keyword, a CIDR or a host name pattern."""
    if pattern in _WORDS or _PATTERN.match(pattern) or pattern.startswith("unix:"):
        return
    try:
        ipaddress.ip_network(pattern)
    except ValueError as error:
        raise ValueError(
            f"{option}: {pattern!r} is not one of {', '.join(sorted(_WORDS))}, a CIDR such as "
            "10.0.0.0/8, or a name pattern such as *.gpu.example.com"
        ) from error


async def require_allowed(url: str, patterns: Sequence[str]) -> None:
    """Raise BadRequest unless a backend with this (valid) URL may be added."""
    address = parse_base_url(url)
    if address.unix_path is not None:
        if not any(fnmatchcase(f"unix:{address.unix_path}", pattern) for pattern in patterns):
            raise _refused(f"unix:{address.unix_path}")
        return
    host = address.host.rstrip(".").lower()
    literal = _literal(host)
    if literal is not None:
        if not is_allowed_address(literal, patterns):
            raise _refused(host)
        return
    if host in _METADATA_NAMES or _NUMBER_LABEL.match(host.rpartition(".")[2]):
        raise _refused(host)
    resolved = await _resolve(host, address.port)
    if any(is_forbidden(address) for address in resolved):
        raise _refused(f"{host} (which resolves to a metadata address)")
    if is_allowed_name(host, patterns):
        return
    if not resolved or not all(is_allowed_address(address, patterns) for address in resolved):
        raise _refused(host)


def is_allowed_address(address: Address, patterns: Iterable[str]) -> bool:
    """Whether a literal address matches one of the patterns and is not a metadata address."""
    address = without_wrapping(address)
    return not is_forbidden(address) and any(_matches(address, pattern) for pattern in patterns)


def is_allowed_name(host: str, patterns: Iterable[str]) -> bool:
    """Whether a host name matches one of the patterns."""
    is_local = "." not in host or host.endswith(_CLUSTER_SUFFIXES)
    return any(
        (is_local and host != "localhost")
        if pattern == "cluster"
        else host == "localhost"
        if pattern == "loopback"
        else pattern not in _WORDS and fnmatchcase(host, pattern.lower())
        for pattern in patterns
    )


def _matches(address: Address, pattern: str) -> bool:
    if pattern == "loopback":
        return address.is_loopback
    if pattern == "private":
        is_private = address.is_private or (address.version == 4 and address in _SHARED_NET)
        is_routable = not (address.is_loopback or address.is_unspecified or address.is_multicast)
        return is_private and is_routable
    try:
        net = ipaddress.ip_network(pattern)
    except ValueError:
        return False  # a name pattern
    return net.version == address.version and address in net


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


async def _resolve(host: str, port: int) -> list[Address]:
    """Return the current addresses of a name; none if it cannot be resolved (yet)."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in found]


def _refused(what: str) -> BadRequest:
    return BadRequest(
        f"{what} is not allowed as a backend host: add it to admin.allow_backend_hosts "
        "(metadata and link-local addresses are always refused)",
        param="url",
    )
