"""Builds the answers of the admin API from the gateway's own values. Changes nothing."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from gateway.admin.answers import (
    BackendAnswer,
    CandidateAnswer,
    DecisionAnswer,
    Drain,
    GroupAnswer,
    GroupHolder,
    Prewarm,
    RecentSession,
    RingShare,
    RoutingBelief,
    Status,
    StoreAnswer,
    TurnCurvePoint,
)
from gateway.admin.order_answers import OrderAnswer
from gateway.admin.parts import AdminParts
from gateway.admin.session_answers import (
    IgnoredIdAnswer,
    MoveAnswer,
    SessionAnswer,
    SessionRow,
    StoryAnswer,
    TurnAnswer,
)
from gateway.replicas.order_book import Subject
from gateway.request.journal import Group, MoveRow, Story, TurnBucket
from gateway.routing.what_if import ring_shares
from gateway.values import Backend, BackendId, Binding, Decision, RequestFacts, SessionKey

Counts = Mapping[BackendId, int]


def describe_backends(parts: AdminParts, sessions: Counts) -> list[BackendAnswer]:
    """Describe all backends, in fleet order."""
    beliefs = parts.router.snapshot()
    return [
        describe_backend(parts, backend, sessions, beliefs) for backend in parts.fleet.view.backends.values()
    ]


def describe_backend(
    parts: AdminParts, backend: Backend, sessions: Counts, beliefs: Mapping[BackendId, object]
) -> BackendAnswer:
    backend_id, metrics = backend.backend_id, parts.metrics
    report = parts.fleet.report(backend_id)
    prompt_tokens = int(metrics.value(metrics.prompt_tokens, backend_id))
    cached_tokens = int(metrics.value(metrics.cached_tokens, backend_id))
    belief = beliefs.get(backend_id)
    return BackendAnswer(
        id=backend_id,
        url=backend.base_url,
        engine=backend.engine,
        state=backend.state.value,
        is_spared=backend_id in parts.fleet.spared,
        weight=backend.weight,
        epoch=backend.epoch,
        labels=dict(backend.labels),
        models=sorted(backend.models) if backend.models is not None else None,
        sessions=sessions.get(backend_id, 0),
        in_flight=_in_flight(parts, backend_id),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        hit_rate=_share(cached_tokens, prompt_tokens),
        engine_running=report.num_running,
        engine_waiting=report.num_waiting,
        kv_usage=report.kv_usage,
        kv_capacity_tokens=backend.kv_capacity_tokens,
        kv_blocks={name: int(count) for name, count in report.blocks.items()} if report.blocks else None,
        drain=_describe_drain(parts, backend_id, sessions),
        routing=None if belief is None else msgspec.convert(belief, RoutingBelief),
        orders=describe_orders(parts, parts.operator.standing(backend_id)),
    )


def describe_orders(parts: AdminParts, subjects: Iterable[Subject]) -> list[OrderAnswer]:
    orders = parts.operator.orders()
    return [
        OrderAnswer(
            backend=subject.backend_id,
            about=subject.about,
            wants=orders[subject].wants,
            weight=orders[subject].weight,
            at_wall_s=orders[subject].ms / 1000,
            author=orders[subject].author,
            is_shared=parts.operator.is_shared(subject),
        )
        for subject in subjects
    ]


def _in_flight(parts: AdminParts, backend_id: BackendId) -> int:
    """Return the requests in flight, added up over all processes of this machine."""
    elsewhere = parts.metrics.elsewhere("homing_backend_in_flight", backend_id)
    return parts.router.in_flight(backend_id) + int(elsewhere)


def _describe_drain(parts: AdminParts, backend_id: BackendId, sessions: Counts) -> Drain | None:
    left_s = parts.fleet.drain_left_s(backend_id)
    if left_s is None:
        return None
    in_flight, bound = _in_flight(parts, backend_id), sessions.get(backend_id, 0)
    progress = parts.handover.progress.get(backend_id)
    return Drain(
        deadline_left_s=round(left_s, 1),
        in_flight=in_flight,
        sessions=bound,
        is_drained=in_flight == 0 and (bound == 0 or left_s == 0),
        prewarm=None
        if progress is None
        else Prewarm(
            planned=progress.planned,
            warmed=progress.warmed,
            failed=progress.failed,
            is_done=progress.is_done,
        ),
    )


def describe_status(parts: AdminParts, sessions: Counts) -> Status:
    store, metrics = parts.sessions.stats(), parts.metrics
    return Status(
        generation=parts.fleet.view.generation,
        backends=describe_backends(parts, sessions),
        session_store=StoreAnswer(
            kind=store.kind,
            sessions=sum(sessions.values()) or store.num_sessions,
            is_degraded=store.is_degraded,
        ),
        affinity=metrics.totals(metrics.affinity),
        moves=metrics.totals(metrics.moves),
    )


# -- sessions


def describe_binding(key: SessionKey, binding: Binding) -> SessionRow:
    return SessionRow(
        key=key,
        backend=binding.backend_id,
        epoch=binding.epoch,
        version=binding.version,
        turns=binding.num_turns,
        context_tokens=binding.context_tokens,
    )


def describe_session(parts: AdminParts, key: SessionKey, binding: Binding) -> SessionAnswer:
    story = parts.journal.story(key) if parts.journal is not None else None
    return SessionAnswer(
        **msgspec.structs.asdict(describe_binding(key, binding)),
        story=None if story is None else describe_story(parts, story),
        ignored_id=describe_ignored_id(parts, key),
    )


def describe_ignored_id(parts: AdminParts, key: SessionKey) -> IgnoredIdAnswer | None:
    story = parts.journal.ignored_ids.story(key) if parts.journal is not None else None
    if story is None:
        return None
    return IgnoredIdAnswer(
        requests=dict(story.num_requests),
        last_seen_wall_s=parts.to_wall_s(story.last_seen_s),
        sessions=list(story.sessions),
    )


def describe_story(parts: AdminParts, story: Story) -> StoryAnswer:
    return StoryAnswer(
        key_source=story.key_source.value,
        model=story.model,
        prompt_group=story.prompt_key,
        first_seen_wall_s=parts.to_wall_s(story.first_seen_s),
        last_seen_wall_s=parts.to_wall_s(story.last_seen_s),
        turns_seen=story.num_turns,
        prompt_tokens=story.prompt_tokens,
        cached_tokens=story.cached_tokens,
        hit_rate=_share(story.cached_tokens, story.prompt_tokens),
        moves=describe_moves(parts, story.moves),
        last_turns=[
            TurnAnswer(
                at_wall_s=parts.to_wall_s(at_s),
                backend=backend_id,
                affinity=affinity.value,
                reason=reason,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                ttft_s=None if ttft_s is None else round(ttft_s, 4),
                status=status,
                outcome=outcome.value,
            )
            for (
                at_s,
                backend_id,
                affinity,
                reason,
                prompt_tokens,
                cached_tokens,
                ttft_s,
                status,
                outcome,
            ) in story.turns
        ],
    )


def describe_moves(parts: AdminParts, moves: Iterable[MoveRow]) -> list[MoveAnswer]:
    return [
        MoveAnswer(at_wall_s=parts.to_wall_s(at_s), session=key, before=before, after=after, reason=reason)
        for at_s, key, before, after, reason in moves
    ]


def describe_recent(parts: AdminParts, stories: Iterable[Story]) -> list[RecentSession]:
    return [
        RecentSession(
            key=story.key,
            backend=story.backend_id,
            model=story.model,
            turns_seen=story.num_turns,
            hit_rate=_share(story.cached_tokens, story.prompt_tokens),
            last_seen_wall_s=parts.to_wall_s(story.last_seen_s),
        )
        for story in stories
    ]


# -- decisions


def describe_decision(facts: RequestFacts, binding: Binding | None, decision: Decision) -> DecisionAnswer:
    return DecisionAnswer(
        backend=decision.backend_id,
        affinity=decision.affinity.value,
        reason=decision.reason,
        policy=decision.policy,
        key_source=facts.key_source.value,
        session=facts.session_key,
        prompt_group=facts.prompt_key,
        binding=describe_binding(facts.session_key, binding) if facts.session_key and binding else None,
        prompt_tokens=decision.prompt_tokens,
        expected_cached_tokens=decision.expected_cached_tokens,
        candidates=[
            CandidateAnswer(
                backend=candidate.backend_id,
                price=candidate.price if math.isfinite(candidate.price) else None,
                reason=candidate.reason,
                expected_cached_tokens=candidate.expected_cached_tokens,
                wait_s=candidate.wait_s,
                prefill_s=candidate.prefill_s,
            )
            for candidate in decision.ranked
        ],
    )


_shares_of = lru_cache(maxsize=1)(ring_shares)  # a ring is immutable, and an open dashboard polls


async def describe_ring(parts: AdminParts) -> list[RingShare]:
    """Return each backend's share.

    Computed once per ring, in a thread: 1,000 backends take a third of a second.
    """
    shares = await asyncio.to_thread(_shares_of, parts.router.ring)
    return [
        RingShare(backend=backend_id, weight=backend.weight, share=round(shares.get(backend_id, 0.0), 6))
        for backend_id, backend in sorted(parts.fleet.view.backends.items())
    ]


# -- groups and curves


def describe_group(parts: AdminParts, group: Group) -> GroupAnswer:
    holders = parts.router.holders(group.prefix) if group.prefix else {}
    return GroupAnswer(
        key=group.key,
        model=group.model,
        requests=group.num_requests,
        recent_requests=round(group.heat_at(parts.clock()), 2),
        hit_rate=_share(group.cached_tokens, group.prompt_tokens),
        prefix_tokens=max(holders.values(), default=0),
        last_seen_wall_s=parts.to_wall_s(group.last_seen_s),
        holders=[
            GroupHolder(backend=backend_id, tokens=tokens) for backend_id, tokens in sorted(holders.items())
        ],
    )


def describe_turns(buckets: Sequence[TurnBucket]) -> list[TurnCurvePoint]:
    return [
        TurnCurvePoint(
            turn=number,
            num_turns=bucket.num_turns,
            hit_rate=_share(bucket.cached_tokens, bucket.prompt_tokens),
            ttft_hit_s=_median(bucket.ttft_hit_s),
            ttft_cold_s=_median(bucket.ttft_cold_s),
            ttft_unknown_s=_median(bucket.ttft_unknown_s),
        )
        for number, bucket in enumerate(buckets, start=1)
        if bucket.num_turns
    ]


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _median(samples: Iterable[float]) -> float | None:
    values = list(samples)
    return round(statistics.median(values), 5) if values else None
