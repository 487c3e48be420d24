"""Which API keys may be sent to a backend that is added through the API.

A holder of the admin token must not be able to have a key sent to a host of their own. So a key is only sent
to hosts that the configuration already sends it to, over the same transport (never in plain text where the
configuration uses TLS), or to hosts that `admin.key_hosts` lists. Ports of a host are not distinguished: a
machine may run several engines, and the admin API does not control who listens on it.

This module sees only the names of environment variables, not the keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.admin.backend_hosts import require_allowed
from gateway.admin.parts import AdminConfig
from gateway.errors import BadRequest
from gateway.fleet.settings import BackendSettings
from gateway.upstream.address import parse_base_url


async def require_key_allowed(
    backend: BackendSettings, config: AdminConfig, environ: Mapping[str, str]
) -> None:
    """Raise BadRequest unless the variable in `api_key_env` is set and may be sent to this backend's host."""
    variable = backend.api_key_env
    if variable is None:
        return
    place = _place_of(backend.url)
    if not any(known.api_key_env == variable and _place_of(known.url) == place for known in config.backends):
        try:
            await require_allowed(backend.url, config.admin.key_hosts.get(variable, ()))
        except BadRequest as error:
            raise _refused(
                f"{variable!r} may not be sent to this host: no configured backend on this host uses it, and "
                f"admin.key_hosts does not list the host for it"
            ) from error
    if not environ.get(variable):
        raise _refused(f"{variable!r} is not set in the gateway's environment")


def _place_of(url: str) -> tuple[str, bool, str | None]:
    address = parse_base_url(url)
    return address.host, address.is_tls, address.unix_path


def _refused(message: str) -> BadRequest:
    return BadRequest(f"api_key_env: {message}", param="api_key_env")
