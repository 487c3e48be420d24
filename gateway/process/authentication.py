"""Builds authentication from the configuration: the directory of tenants and the kinds of proof accepted.

A reload can replace the directory while requests run; changing the kinds of proof needs a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gateway.config.config import Config, ConfigError, key_secret
from gateway.tenants.directory import Directory
from gateway.tenants.gatekeeper import Gatekeeper, Proof
from gateway.tenants.redis_keys import RedisKeys
from gateway.tenants.settings import JwtSettings

if TYPE_CHECKING:
    from gateway.tenants.bearer_tokens import BearerTokens


class Authentication:
    """One per gateway process. Raises ConfigError for unusable keys or a missing package."""

    def __init__(
        self,
        config: Config,
        redis_keys: RedisKeys | None,
        *,
        clock: Callable[[], float],
        environ: Mapping[str, str],
    ) -> None:
        self._environ = environ
        settings = config.authentication
        self._tokens = _make_tokens(settings.jwt, clock)
        proofs: list[Proof] = [] if self._tokens is None else [self._tokens]
        if redis_keys is not None:
            proofs.append(redis_keys)
        self.gatekeeper = Gatekeeper(self.make_directory(config), tuple(proofs), clock=clock)

    def start(self) -> None:
        if self._tokens is not None:
            self._tokens.start()

    async def close(self) -> None:
        if self._tokens is not None:
            await self._tokens.close()

    def make_directory(self, config: Config) -> Directory:
        """Read keys and rules of all tenants. Raises ConfigError. Changes nothing."""
        try:
            return Directory(
                config.tenants,
                config.authentication,
                config.limits.per_tenant,
                secret=key_secret(self._environ),
                environ=self._environ,
            )
        except ValueError as error:
            raise ConfigError(f"tenants: {error}") from error

    def take_over(self, directory: Directory) -> None:
        """Use this directory from now on, also for credentials that were verified before."""
        self.gatekeeper.directory = directory


def _make_tokens(settings: JwtSettings | None, clock: Callable[[], float]) -> BearerTokens | None:
    if settings is None:
        return None
    try:
        from gateway.tenants.bearer_tokens import BearerTokens  # an extra: imported only when configured
    except ImportError as error:
        raise ConfigError("authentication.jwt needs PyJWT: run pip install 'homing[jwt]'") from error
    return BearerTokens(settings, clock=clock)
