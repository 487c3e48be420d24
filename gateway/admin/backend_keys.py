"""Which key an operator may have the gateway send to a backend that is added through the API.

A key is worth more than the admin token: whoever holds only the token must not have it sent to a host of
their own. So a key stays with the hosts that the configuration sends it to, in the same transport (never in
plain text where the configuration says TLS), and goes further only where `admin.key_hosts` says so. Ports of
one host are not told apart: a machine runs several engines, and who may listen on it is not the admin API's
to decide.

Knows the value of no key: it answers for the names of variables.
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
    """Raise BadRequest unless this backend's `api_key_env` is for its host, and set."""
    variable = backend.api_key_env
    if variable is None:
        return
    place = _place_of(backend.url)
    if not any(one.api_key_env == variable and _place_of(one.url) == place for one in config.backends):
        try:
            await require_allowed(backend.url, config.admin.key_hosts.get(variable, ()))
        except BadRequest as error:
            raise _refused(
                f"{variable!r} may not be sent to this host: no backend of the configuration there uses it, "
                f"and admin.key_hosts does not name the host for it"
            ) from error
    if not environ.get(variable):
        raise _refused(f"the gateway's environment has no {variable!r}")


def _place_of(url: str) -> tuple[str, bool, str | None]:
    address = parse_base_url(url)
    return address.host, address.is_tls, address.unix_path


def _refused(message: str) -> BadRequest:
    return BadRequest(f"api_key_env: {message}", param="api_key_env")
