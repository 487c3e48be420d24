"""TLS towards clients: which certificate we show, and whether clients must show one.

A context is made from the files as a whole and never changed: one that cannot be made leaves the one in use
as it is. (Loading a new chain into a live context is not all or nothing: OpenSSL takes the certificate before
it finds that the key is another's.) Reads files, so it runs at start and at a rotation, never per connection.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Literal

import msgspec

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class ListenerTls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """TLS of one listener. Changed files are picked up for new connections; open connections continue."""

    cert_file: str
    """PEM file of the server certificate, followed by those of its issuers."""
    key_file: str | None = None
    """PEM file of the private key, without a passphrase. Not needed if `cert_file` contains the key."""
    client_ca_file: str | None = None
    """PEM file of certificate authorities. If set, clients must present a certificate signed by one
    (mTLS)."""
    min_version: Literal["1.2", "1.3"] = "1.2"
    """Minimum TLS version."""

    @property
    def files(self) -> tuple[Path, ...]:
        named = (self.cert_file, self.key_file, self.client_ca_file)
        return tuple(Path(name) for name in named if name is not None)


def make_server_context(settings: ListenerTls) -> ssl.SSLContext:
    """Raises ValueError that names the file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[settings.min_version]
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.cert_file, settings.key_file, password=_no_passphrase)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ValueError(
            f"cert_file {settings.cert_file!r} and key_file {settings.key_file!r} cannot be used: "
            f"{_reason(error)}"
        ) from error
    if settings.client_ca_file is not None:
        try:
            context.load_verify_locations(settings.client_ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(
                f"client_ca_file {settings.client_ca_file!r} cannot be used: {_reason(error)}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_passphrase() -> str:
    """Without it OpenSSL would ask on the terminal, and a service would hang."""
    raise ValueError("the private key has a passphrase; give one without")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not PEM, or not a matching pair ({error.reason or 'unreadable'})"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
