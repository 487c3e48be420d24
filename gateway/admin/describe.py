"""Values as the admin API and the command line show them: plain dicts, units in the names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.fleet.registry import Fleet
from gateway.handover import Handover
from gateway.metrics import GatewayMetrics
from gateway.routing.router import Router
from gateway.sessions.store import SessionStore
from gateway.values import Backend, BackendId, Binding, Decision, RequestFacts, SessionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSources:
    """Where the facts about backends are read from."""

    fleet: Fleet
    router: Router
    metrics: GatewayMetrics
    handover: Handover


def describe_backends(sources: FleetSources, sessions: Mapping[BackendId, int]) -> list[dict[str, Any]]:
    """All backends: configured, observed, and what routing believes of them."""
    routing = sources.router.snapshot()
    return [
        describe_backend(backend, sources, sessions, routing)
        for backend in sources.fleet.view.backends.values()
    ]


def describe_backend(
    backend: Backend,
    sources: FleetSources,
    sessions: Mapping[BackendId, int],
    routing: Mapping[BackendId, object],
) -> dict[str, Any]:
    backend_id, metrics = backend.backend_id, sources.metrics
    report = sources.fleet.report(backend_id)
    prompt_tokens = metrics.value(metrics.prompt_tokens, backend_id)
    cached_tokens = metrics.value(metrics.cached_tokens, backend_id)
    return {
        "id": backend_id,
        "url": backend.base_url,
        "engine": backend.engine,
        "state": backend.state.value,
        "weight": backend.weight,
        "epoch": backend.epoch,
        "labels": dict(backend.labels),
        "models": sorted(backend.models) if backend.models is not None else None,
        "sessions": sessions.get(backend_id, 0),
        "in_flight": sources.router.in_flight(backend_id),
        "prompt_tokens": int(prompt_tokens),
        "cached_tokens": int(cached_tokens),
        "hit_rate": round(cached_tokens / prompt_tokens, 4) if prompt_tokens else None,
        "engine_running": report.num_running,
        "engine_waiting": report.num_waiting,
        "kv_usage": report.kv_usage,
        "kv_capacity_tokens": backend.kv_capacity_tokens,
        "kv_blocks": dict(report.blocks) if report.blocks is not None else None,
        "drain": _describe_drain(backend_id, sources, sessions),
        "routing": routing.get(backend_id),
    }


def _describe_drain(
    backend_id: BackendId, sources: FleetSources, sessions: Mapping[BackendId, int]
) -> dict[str, Any] | None:
    """How far a drain has come: it is over when nothing runs and nobody is bound, or at its deadline."""
    left_s = sources.fleet.drain_left_s(backend_id)
    if left_s is None:
        return None
    in_flight, bound = sources.router.in_flight(backend_id), sessions.get(backend_id, 0)
    progress = sources.handover.progress.get(backend_id)
    return {
        "deadline_left_s": round(left_s, 1),
        "in_flight": in_flight,
        "sessions": bound,
        "is_drained": in_flight == 0 and (bound == 0 or left_s == 0),
        "prewarm": None
        if progress is None
        else {
            "planned": progress.planned,
            "warmed": progress.warmed,
            "failed": progress.failed,
            "is_done": progress.is_done,
        },
    }


def describe_status(
    sources: FleetSources, sessions: SessionStore, counts: Mapping[BackendId, int]
) -> dict[str, Any]:
    """The whole fleet on one page."""
    store, metrics = sessions.stats(), sources.metrics
    return {
        "generation": sources.fleet.view.generation,
        "backends": describe_backends(sources, counts),
        "session_store": {
            "kind": store.kind,
            "sessions": sum(counts.values()) or store.num_sessions,
            "is_degraded": store.is_degraded,
        },
        "affinity": metrics.totals(metrics.affinity),
        "moves": metrics.totals(metrics.moves),
    }


def describe_binding(key: SessionKey, binding: Binding) -> dict[str, Any]:
    return {
        "key": key,
        "backend": binding.backend_id,
        "epoch": binding.epoch,
        "version": binding.version,
        "turns": binding.num_turns,
        "context_tokens": binding.context_tokens,
    }


def describe_decision(facts: RequestFacts, binding: Binding | None, decision: Decision) -> dict[str, Any]:
    """A decision with every candidate it weighed."""
    return {
        "backend": decision.backend_id,
        "affinity": decision.affinity.value,
        "reason": decision.reason,
        "policy": decision.policy,
        "key_source": facts.key_source.value,
        "session": facts.session_key,
        "prompt_group": facts.prompt_key,
        "binding": describe_binding(facts.session_key, binding) if facts.session_key and binding else None,
        "prompt_tokens": decision.prompt_tokens,
        "expected_cached_tokens": decision.expected_cached_tokens,
        "candidates": [
            {
                "backend": one.backend_id,
                "price": one.price,
                "reason": one.reason,
                "expected_cached_tokens": one.expected_cached_tokens,
                "wait_s": one.wait_s,
                "prefill_s": one.prefill_s,
            }
            for one in decision.ranked
        ],
    }
