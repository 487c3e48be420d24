"""The part of the configuration that the request path reads.

`gateway.config` imports the settings of every package, so no package below it may import it back. The
composition root hands in the whole `Config`; this Protocol says what is read of it.
"""

from __future__ import annotations

from typing import Protocol

from gateway.downstream.settings import DownstreamSettings
from gateway.limits.settings import LimitSettings
from gateway.routing.failover import FailoverSettings
from gateway.tenants.settings import AuthenticationSettings
from gateway.wire.settings import HeaderSettings


class RequestConfig(Protocol):
    """Satisfied by `gateway.config.config.Config`."""

    @property
    def authentication(self) -> AuthenticationSettings: ...

    @property
    def downstream(self) -> DownstreamSettings: ...

    @property
    def failover(self) -> FailoverSettings: ...

    @property
    def headers(self) -> HeaderSettings: ...

    @property
    def limits(self) -> LimitSettings: ...

    @property
    def passthrough_paths(self) -> tuple[str, ...]: ...

    @property
    def passes_client_credentials(self) -> bool: ...

    @property
    def passes_client_key(self) -> bool: ...
