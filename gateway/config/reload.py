"""Applies a changed configuration without a restart: read it, check it, swap it in, or change nothing.

Decision: all or nothing. The new configuration is read and validated as at start and compared with the one in
force. Everything that can fail (a certificate, a conflict with a backend that the admin API added) is tried
before the first change. Options that cannot change while requests run need a restart, and a file that changes
one of them is rejected as a whole, because nobody wrote the half that would be left.

Invariant: a request sees the old configuration or the new one, never a mixture, because the swap happens
between two events of the loop. Knows nothing of files or signals: it is given a function that reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

from gateway.config.config import Config, ConfigError
from gateway.observability.logs import log_event
from gateway.routing.settings import FIXED_WHILE_RUNNING
from gateway.values import ReloadReport

LIVE_SECTIONS = frozenset(
    {
        "backends",
        "keys",
        "headers",
        "key_watch",
        "routing",
        "health",
        "failover",
        "fleet",
        "limits",
        "authentication",
        "tenants",
        "log",
        "passthrough_paths",
        "drain_timeout_s",
        "leaving_notice_s",
        "reload",
    }
)
"""Sections whose options can all change while requests run, except `RESTART_OPTIONS`."""
LIVE_OPTIONS = frozenset({"listen.tls", "admin.tls", "downstream.cors"})
RESTART_OPTIONS = frozenset(
    {
        "fleet.discovery",
        "limits.max_tenants_tracked",
        "authentication.jwt",
        "authentication.keys_in_redis",
        "authentication.keys_in_redis_ttl_s",
        *(f"routing.{name}" for name in FIXED_WHILE_RUNNING),
    }
)
"""Options of live sections that need a restart, because learned state or open connections depend on them."""

_P = TypeVar("_P")


class Target(Protocol[_P]):
    """What a reload needs of the running gateway."""

    def prepare(self, config: Config) -> _P:
        """Build everything that can fail. Raises ConfigError. Changes nothing; runs in a thread."""
        ...

    async def swap(self, config: Config, prepared: _P) -> None:
        """Apply it. May raise OSError, but only before anything has changed."""
        ...


class Reloader(Generic[_P]):
    """Owns the configuration in force. One reload at a time."""

    def __init__(self, config: Config, *, load: Callable[[], Config], target: Target[_P]) -> None:
        """`load` reads the configuration again, in a thread; raises ConfigError."""
        self.config = config
        self.generation = 1
        self.is_last_successful = True
        self._load, self._target = load, target
        self._lock = asyncio.Lock()

    async def reload(self) -> ReloadReport:
        """Read the configuration and the certificates again. Mistakes are reported, not raised."""
        return await self._take_over(self._load)

    async def renew_certificates(self) -> ReloadReport:
        """Read only the certificates again."""
        return await self._take_over(lambda: self.config)

    async def _take_over(self, load: Callable[[], Config]) -> ReloadReport:
        async with self._lock:
            try:
                config, prepared = await asyncio.to_thread(self._read, load)
                changed = changed_paths(self.config, config)
                await self._target.swap(config, prepared)
            except (ConfigError, ValueError, OSError) as error:
                return self._reject((str(error),))
            except _NeedsRestart as error:
                return self._reject(tuple(f"{path}: needs a restart" for path in error.paths), error.changed)
            return self._accept(config, changed)

    def _read(self, load: Callable[[], Config]) -> tuple[Config, _P]:
        config = load()
        changed = changed_paths(self.config, config)
        fixed = tuple(path for path in changed if not is_live(path))
        if fixed:
            raise _NeedsRestart(fixed, changed)
        return config, self._target.prepare(config)

    def _reject(self, errors: tuple[str, ...], changed: tuple[str, ...] = ()) -> ReloadReport:
        self.is_last_successful = False
        log_event("config_rejected", level=logging.ERROR, errors=errors, generation=self.generation)
        return ReloadReport(outcome="rejected", generation=self.generation, changed=changed, errors=errors)

    def _accept(self, config: Config, changed: tuple[str, ...]) -> ReloadReport:
        self.is_last_successful = True
        self.config = config
        self.generation += bool(changed)
        log_event("config_reloaded", changed=changed, generation=self.generation)
        return ReloadReport(
            outcome="applied" if changed else "unchanged", generation=self.generation, changed=changed
        )


class _NeedsRestart(Exception):
    def __init__(self, paths: tuple[str, ...], changed: tuple[str, ...]) -> None:
        super().__init__(paths)
        self.paths, self.changed = paths, changed


def changed_paths(before: Config, after: Config) -> tuple[str, ...]:
    """Return the paths that differ: `routing.stay_gain`, `workers`, or a whole `backends.gpu-1`."""
    return tuple(_differences("", _comparable(before), _comparable(after)))


def is_live(path: str) -> bool:
    """Whether this option can change while requests run."""
    if _is_among(path, RESTART_OPTIONS):
        return False
    return path.partition(".")[0] in LIVE_SECTIONS or _is_among(path, LIVE_OPTIONS)


def _is_among(path: str, options: frozenset[str]) -> bool:
    """Whether it is one of these options or inside one."""
    return any(path == option or path.startswith(f"{option}.") for option in options)


def _comparable(config: Config) -> dict[str, object]:
    """Return plain values, with backends by name: a changed order of the list is not a change."""
    data: dict[str, object] = msgspec.to_builtins(config)
    backends = {backend.backend_id: (msgspec.to_builtins(backend),) for backend in config.backends}
    return data | {"backends": backends}


def _differences(path: str, before: object, after: object) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys([*before, *after]):
            inner = f"{path}.{name}" if path else str(name)
            yield from _differences(inner, before.get(name), after.get(name))
    elif before != after:
        yield path
