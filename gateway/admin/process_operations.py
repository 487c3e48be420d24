"""Operations on the gateway process: configuration, log level, counters, replicas, summary."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gateway.admin.answers import ConfigAnswer, Counters, LogLevel, Replica, ReplicaList, Summary
from gateway.admin.describe import (
    describe_group,
    describe_moves,
    describe_recent,
    describe_ring,
    describe_status,
    describe_turns,
)
from gateway.admin.operations import Operation
from gateway.admin.orders import LogLevelOrder
from gateway.admin.parts import AdminParts
from gateway.observability.logs import log_event
from gateway.values import ReloadReport

MASK = "•••"
SUMMARY_ROWS = 20
_SECRET_NAME = re.compile(r"(?:password|secret|token|api_key|private_key)s?\Z")


class ProcessOperations:
    """What operators can see and change of one process."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts

    def operations(self) -> list[Operation]:
        return [
            Operation("GET", "/summary", self.show_summary, "Get the dashboard's data", tag="process"),
            Operation("GET", "/config", self.show_config, "Show the configuration, masked", tag="process"),
            Operation(
                "POST", "/config/reload", self.reload_config, "Reload the configuration", tag="process"
            ),
            Operation("GET", "/log-level", self.show_log_level, "Show the log level", tag="process"),
            Operation("PUT", "/log-level", self.set_log_level, "Change the log level", tag="process"),
            Operation("GET", "/counters", self.show_counters, "Show counters by cause", tag="process"),
            Operation("GET", "/replicas", self.list_replicas, "List this fleet's gateways", tag="process"),
        ]

    async def show_config(self) -> ConfigAnswer:
        return ConfigAnswer(config=mask_secrets(msgspec.to_builtins(self._parts.config())))

    async def reload_config(self) -> ReloadReport:
        """All or nothing: an invalid configuration is reported and changes nothing."""
        return await self._parts.reload()

    async def show_log_level(self) -> LogLevel:
        return LogLevel(level=logging.getLevelName(logging.getLogger().level).lower())

    async def set_log_level(self, *, body: LogLevelOrder) -> LogLevel:
        """Applies to this process until it ends or a reload changes the level."""
        logging.getLogger().setLevel(body.level.upper())
        log_event("log_level", level=logging.WARNING, set_to=body.level)
        return await self.show_log_level()

    async def show_counters(self) -> Counters:
        metrics, totals = self._parts.metrics, self._parts.metrics.totals
        return Counters(
            requests=totals(metrics.requests),
            affinity=totals(metrics.affinity),
            moves=totals(metrics.moves),
            retries=totals(metrics.retries),
            errors=totals(metrics.errors, 1),
            upstream_errors=totals(metrics.upstream_errors),
            client_disconnects=totals(metrics.client_gone),
            prompt_tokens=totals(metrics.prompt_tokens),
            cached_tokens=totals(metrics.cached_tokens),
            expected_cached_tokens=totals(metrics.expected_tokens),
            completion_tokens=totals(metrics.completion_tokens),
            recomputed_tokens=totals(metrics.recomputed_tokens, 1),
            usage_unknown=totals(metrics.usage_unknown),
        )

    async def list_replicas(self) -> ReplicaList:
        ours = describe_replica(self._parts)
        told = await self._parts.presence.publish(ours.encoded())
        others: list[Replica] = []
        for report in told:
            try:
                others.append(msgspec.json.decode(report, type=Replica))
            except msgspec.DecodeError:  # written by another version, or invalid: not shown
                continue
        return ReplicaList(replicas=[ours, *sorted(others, key=lambda replica: replica.name)])

    async def show_summary(self) -> Summary:
        parts = self._parts
        metrics, journal, now_s = parts.metrics, parts.journal, parts.clock()
        sessions = await parts.sessions.count_by_backend()
        return Summary(
            at_wall_s=round(parts.wall_clock(), 3),
            version=importlib.metadata.version("homing"),
            status=describe_status(parts, sessions),
            in_flight=parts.num_in_flight(),
            prompt_tokens=int(sum(metrics.totals(metrics.prompt_tokens).values())),
            cached_tokens=int(sum(metrics.totals(metrics.cached_tokens).values())),
            requests=metrics.totals(metrics.requests),
            errors=metrics.totals(metrics.errors, 1),
            recomputed_tokens=metrics.totals(metrics.recomputed_tokens, 1),
            by_turn=describe_turns(journal.by_turn) if journal else [],
            recent_moves=describe_moves(parts, list(journal.recent_moves)[-SUMMARY_ROWS:]) if journal else [],
            recent_sessions=describe_recent(parts, journal.recent(SUMMARY_ROWS)) if journal else [],
            groups=[describe_group(parts, group) for group in journal.hottest(now_s, SUMMARY_ROWS)]
            if journal
            else [],
            ring=await describe_ring(parts),
        )


def describe_replica(parts: AdminParts) -> Replica:
    """Describe this process."""
    backends = parts.fleet.view.backends.values()
    return Replica(
        name=f"{socket.gethostname()}:{os.getpid()}",
        version=importlib.metadata.version("homing"),
        started_wall_s=round(parts.started_wall_s, 3),
        generation=parts.fleet.view.generation,
        backends=len(backends),
        backends_ready=sum(backend.state.takes_new_sessions for backend in backends),
        in_flight=parts.num_in_flight(),
        is_store_degraded=parts.sessions.stats().is_degraded,
    )


def mask_secrets(value: Any, name: str = "") -> Any:
    """Return the data with secrets masked: values whose name suggests a secret, and passwords in URLs.

    The configuration normally names environment variables and holds no secrets; this catches exceptions.
    """
    if isinstance(value, Mapping):
        return {key: mask_secrets(member, str(key)) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [mask_secrets(member, name) for member in value]
    if isinstance(value, str) and value:
        if _SECRET_NAME.search(name):
            return MASK
        if "://" in value and "@" in value:
            return _mask_url(value)
    return value


def _mask_url(url: str) -> str:
    try:
        password = urlsplit(url).password
    except ValueError:
        return MASK
    return url.replace(f":{password}@", f":{MASK}@") if password else url
