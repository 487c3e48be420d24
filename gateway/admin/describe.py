"""Values as the admin API and the command line show them: plain dicts, units in the names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.fleet.registry import Fleet
from gateway.metrics import GatewayMetrics
from gateway.routing.router import Router
from gateway.sessions.store import SessionStore
from gateway.values import Backend, BackendId, Binding, Decision, RequestFacts, SessionKey


def describe_backend(
    backend: Backend,
    fleet: Fleet,
    router: Router,
    metrics: GatewayMetrics,
    sessions: Mapping[BackendId, int],
) -> dict[str, Any]:
    """One backend: configured, observed, and what routing believes of it."""
    backend_id = backend.backend_id
    report = fleet.report(backend_id)
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
        "in_flight": router.in_flight(backend_id),
        "prompt_tokens": int(prompt_tokens),
        "cached_tokens": int(cached_tokens),
        "hit_rate": round(cached_tokens / prompt_tokens, 4) if prompt_tokens else None,
        "engine_running": report.num_running,
        "engine_waiting": report.num_waiting,
        "kv_usage": report.kv_usage,
        "kv_capacity_tokens": backend.kv_capacity_tokens,
        "kv_blocks": dict(report.blocks) if report.blocks is not None else None,
        "drain_left_s": fleet.drain_left_s(backend_id),
        "routing": router.snapshot().get(backend_id),
    }


def describe_status(
    fleet: Fleet,
    router: Router,
    sessions: SessionStore,
    metrics: GatewayMetrics,
    counts: Mapping[BackendId, int],
) -> dict[str, Any]:
    """The whole fleet on one page."""
    store = sessions.stats()
    return {
        "generation": fleet.view.generation,
        "backends": [
            describe_backend(backend, fleet, router, metrics, counts)
            for backend in fleet.view.backends.values()
        ],
        "session_store": {
            "kind": store.kind,
            "sessions": store.num_sessions,
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
