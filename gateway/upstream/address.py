"""A backend's base URL as something to dial.

Decision: `http://`, `https://` and `unix:` (an absolute socket path) are the three ways to an engine;
credentials, queries and fragments in a base URL are refused rather than ignored. Does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to connect, and what to say in `Host` and before each path."""

    host: str
    port: int
    is_tls: bool
    unix_path: str | None
    host_header: bytes  # value of the Host field
    path_prefix: bytes  # b"" or b"/v2/engine", never with a slash at its end


def parse_base_url(base_url: str) -> Address:
    """Read `http://host[:port][/prefix]`, `https://…` or `unix:/path/to.sock`.

    Raises ValueError that names what is wrong.
    """
    if base_url.startswith("unix:"):
        return _unix_address(base_url)
    parts = urlsplit(base_url)
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError(f"base_url {base_url!r} must start with http://, https:// or unix:")
    if not parts.hostname:
        raise ValueError(f"base_url {base_url!r} names no host")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"base_url {base_url!r} must not hold credentials, a query or a fragment")
    if not base_url.isascii() or any(ord(char) <= 32 for char in base_url):
        raise ValueError(f"base_url {base_url!r} holds characters that need escaping")
    default_port = _DEFAULT_PORTS[parts.scheme]
    port = parts.port or default_port
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Address(
        host=parts.hostname,
        port=port,
        is_tls=parts.scheme == "https",
        unix_path=None,
        host_header=(host if port == default_port else f"{host}:{port}").encode(),
        path_prefix=parts.path.rstrip("/").encode(),
    )


def _unix_address(base_url: str) -> Address:
    path = base_url.removeprefix("unix:")
    path = path.removeprefix("//")  # unix:///run/x.sock is the same socket
    if not path.startswith("/"):
        raise ValueError(f"base_url {base_url!r} must name an absolute socket path")
    return Address(
        host="localhost", port=0, is_tls=False, unix_path=path, host_header=b"localhost", path_prefix=b""
    )
