"""The TLS context for `https://` backends. Reads files, so it runs when a pool is made, not per request."""

from __future__ import annotations

import ssl

from gateway.upstream.settings import TlsSettings


def make_client_context(settings: TlsSettings) -> ssl.SSLContext:
    """Raises ValueError that names the file that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as exc:
        raise ValueError(f"tls.ca_file {settings.ca_file!r} cannot be used: {exc}") from exc
    if not settings.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if settings.client_cert_file is not None:
        try:
            context.load_cert_chain(settings.client_cert_file, settings.client_key_file)
        except (OSError, ssl.SSLError) as exc:
            raise ValueError(
                f"tls.client_cert_file {settings.client_cert_file!r} cannot be used: {exc}"
            ) from exc
    context.set_alpn_protocols(["http/1.1"])
    return context
