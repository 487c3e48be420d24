"""Taking over a changed configuration without a restart: read, judge, swap; or leave everything as it is.

Decision: all or nothing. The new configuration is read and validated as at start, compared with the one in
force, and everything that can fail (a certificate, a clash with a backend that the admin API added) is tried
before the first change is made. What is not known to be changeable while requests run needs a restart, and a
file that changes it is refused whole: half a configuration would be one that nobody wrote.

Invariant: the swap itself happens between two events of the loop, so a request has the old configuration or
the new one, never some of each. Knows nothing of files or signals: it is given a function that reads.
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
        "reload",
    }
)
"""Sections whose every option is taken over while requests run."""
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
"""Options of live sections that are not: what has been learned or opened depends on them."""

_P = TypeVar("_P")


class Target(Protocol[_P]):
    """The running gateway, as a reload sees it."""

    def prepare(self, config: Config) -> _P:
        """Make everything that can fail. Raises ConfigError. Changes nothing; runs in a thread."""
        ...

    async def swap(self, config: Config, prepared: _P) -> None:
        """Take over. Raises OSError before anything has changed, or not at all."""
        ...


class Reloader(Generic[_P]):
    """Owns the configuration in force. One reload at a time."""

    def __init__(self, config: Config, *, load: Callable[[], Config], target: Target[_P]) -> None:
        """`load` reads the configuration anew; raises ConfigError. It runs in a thread."""
        self.config = config
        self.generation = 1
        self.is_last_successful = True
        self._load, self._target = load, target
        self._lock = asyncio.Lock()

    async def reload(self) -> ReloadReport:
        """Read the configuration and the certificates again. Never raises for what the user wrote."""
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
    """Paths of the options that differ: `routing.stay_gain`, `backends.gpu-1` (as a whole), `workers`."""
    return tuple(_differences("", _comparable(before), _comparable(after)))


def is_live(path: str) -> bool:
    """Whether a change of this option can be taken over while requests run."""
    if _is_among(path, RESTART_OPTIONS):
        return False
    return path.partition(".")[0] in LIVE_SECTIONS or _is_among(path, LIVE_OPTIONS)


def _is_among(path: str, options: frozenset[str]) -> bool:
    """Whether it is one of these, or inside one."""
    return any(path == option or path.startswith(f"{option}.") for option in options)


def _comparable(config: Config) -> dict[str, object]:
    """As plain values, with backends under their names: one that moved in the list has not changed."""
    data: dict[str, object] = msgspec.to_builtins(config)
    backends = {one.backend_id: (msgspec.to_builtins(one),) for one in config.backends}
    return data | {"backends": backends}


def _differences(path: str, before: object, after: object) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys([*before, *after]):
            inner = f"{path}.{name}" if path else str(name)
            yield from _differences(inner, before.get(name), after.get(name))
    elif before != after:
        yield path
