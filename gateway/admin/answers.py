"""The answers of the admin API as types: what is encoded, and what the OpenAPI document says.

Plain values with units in their names; `None` where something is not known or does not apply. Sessions are
named by their key, a hash. Times called `_wall_s` are Unix times, for people and other machines.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.admin.operations import make_etag

# -- backends


class Prewarm(msgspec.Struct, frozen=True, kw_only=True):
    """How far the hand-over of a draining backend's sessions has come."""

    planned: int
    warmed: int
    failed: int
    is_done: bool


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """A drain under way: over when nothing runs and nobody is bound, or at its deadline."""

    deadline_left_s: float
    in_flight: int
    sessions: int
    is_drained: bool
    prewarm: Prewarm | None


class RoutingBelief(msgspec.Struct, frozen=True, kw_only=True):
    """What routing knows and believes of one backend."""

    in_flight: int
    outstanding_work_s: float
    wait_s: float
    shadow_lines: int
    shadow_tokens: int
    kv_usage: float | None
    shadow_trust: float
    prefill_tokens_per_s: float


class BackendAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One backend: configured, observed, and what routing believes of it."""

    id: str
    url: str
    engine: str
    state: str
    weight: float
    epoch: int
    labels: dict[str, str]
    models: list[str] | None
    sessions: int
    in_flight: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float | None
    engine_running: float | None
    engine_waiting: float | None
    kv_usage: float | None
    kv_capacity_tokens: int | None
    kv_blocks: dict[str, int] | None
    drain: Drain | None
    routing: RoutingBelief | None

    def etag(self) -> str:
        """Over what an operator can change, and nothing that moves by itself."""
        wish = self.state if self.state in ("draining", "cordoned") else ""
        return make_etag(self.id, self.url, self.engine, self.weight, self.labels, wish)


class BackendList(msgspec.Struct, frozen=True, kw_only=True):
    backends: list[BackendAnswer]


# -- the whole


class StoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    sessions: int
    is_degraded: bool


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The whole fleet on one page."""

    generation: int
    backends: list[BackendAnswer]
    session_store: StoreAnswer
    affinity: dict[str, float]
    moves: dict[str, float]


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """This replica's counters since its start: requests by API, tokens by backend, the rest by cause."""

    requests: dict[str, float]
    affinity: dict[str, float]
    moves: dict[str, float]
    retries: dict[str, float]
    errors: dict[str, float]
    upstream_errors: dict[str, float]
    client_disconnects: dict[str, float]
    prompt_tokens: dict[str, float]
    cached_tokens: dict[str, float]
    expected_cached_tokens: dict[str, float]
    completion_tokens: dict[str, float]
    recomputed_tokens: dict[str, float]
    usage_unknown: dict[str, float]


class LogLevel(msgspec.Struct, frozen=True, kw_only=True):
    level: str


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway process, as it tells about itself."""

    name: str
    version: str
    started_wall_s: float
    generation: int
    backends: int
    backends_ready: int
    in_flight: int
    is_store_degraded: bool

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    """This replica first; the others as heard of within the last seconds, if they share a session store."""

    replicas: list[Replica]


class ConfigAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved configuration, secrets masked."""

    config: dict[str, Any]


# -- sessions


class MoveAnswer(msgspec.Struct, frozen=True, kw_only=True):
    at_wall_s: float
    session: str
    before: str | None
    after: str
    reason: str


class TurnAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One turn as this replica served it."""

    at_wall_s: float
    backend: str
    affinity: str
    reason: str
    prompt_tokens: int | None
    cached_tokens: int | None
    ttft_s: float | None
    status: int


class StoryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What this replica remembers of a session; turns that other replicas served are not in it."""

    key_source: str
    model: str | None
    prompt_group: str | None
    first_seen_wall_s: float
    last_seen_wall_s: float
    turns_seen: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float | None
    moves: list[MoveAnswer]
    last_turns: list[TurnAnswer]


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session and its home."""

    key: str
    backend: str
    epoch: int
    version: int
    turns: int
    context_tokens: int

    def etag(self) -> str:
        return make_etag(self.key, self.version)


class SessionAnswer(SessionRow, frozen=True, kw_only=True):
    """A session, its home and its story."""

    story: StoryAnswer | None


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    sessions: list[SessionRow]
    next_cursor: str | None


# -- decisions


class CandidateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    price: float | None  # None: beyond all measure
    reason: str
    expected_cached_tokens: int
    wait_s: float
    prefill_s: float


class DecisionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with every candidate it weighed, best first."""

    backend: str
    affinity: str
    reason: str
    policy: str
    key_source: str
    session: str | None
    prompt_group: str | None
    binding: SessionRow | None
    prompt_tokens: int
    expected_cached_tokens: int
    candidates: list[CandidateAnswer]


class RingShare(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    weight: float
    share: float


class RingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How the ring is divided, and the owners of a key, first choice first."""

    shares: list[RingShare]
    key: str | None
    owners: list[str]


class WhatIfBackend(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    weight_before: float | None
    weight_after: float | None
    ring_share_before: float
    ring_share_after: float
    sessions_before: int
    sessions_after: int
    tokens_before: int
    tokens_after: int


class WhatIfAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a change of the fleet would move.

    New sessions follow the ring (before load is weighed); live ones stay at home unless that is removed.
    """

    new_sessions_moved_share: float
    sessions: int
    sessions_moved: int
    sessions_moved_share: float
    tokens: int
    tokens_moved: int
    tokens_moved_share: float
    is_sampled: bool
    backends: list[WhatIfBackend]


# -- prompt groups and pins


class GroupHolder(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    tokens: int


class GroupAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Requests with one system prompt and tools, and who is believed to hold it."""

    key: str
    model: str | None
    requests: int
    recent_requests: float
    hit_rate: float | None
    prefix_tokens: int
    last_seen_wall_s: float
    holders: list[GroupHolder]


class GroupList(msgspec.Struct, frozen=True, kw_only=True):
    groups: list[GroupAnswer]


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A shared prefix that an engine keeps resident, as the engine tells."""

    id: str
    name: str = ""
    owner: str = ""
    priority: int = 0
    state: str = ""
    num_tokens: int = 0
    pinned_tokens: int = 0
    granted_tokens: int = 0
    expires_at: float | None = None


class MissingPin(msgspec.Struct, frozen=True, kw_only=True):
    """A pin of the whole fleet that one backend does not have, and how often it was offered in vain."""

    name: str
    owner: str
    num_tries: int
    is_given_up: bool
    problem: str | None


class BackendPins(msgspec.Struct, frozen=True, kw_only=True):
    """The pins of one backend and those it is still to get, or why they cannot be told."""

    backend: str
    engine: str
    pins: list[Pin]
    missing: list[MissingPin]
    budget_tokens: int | None
    problem: str | None


class PinList(msgspec.Struct, frozen=True, kw_only=True):
    backends: list[BackendPins]


# -- the dashboard


class TurnCurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """All turns with one number in their session; medians over the last few hundred."""

    turn: int
    num_turns: int
    hit_rate: float | None
    ttft_hit_s: float | None
    ttft_cold_s: float | None
    ttft_unknown_s: float | None


class RecentSession(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    backend: str
    model: str | None
    turns_seen: int
    hit_rate: float | None
    last_seen_wall_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the dashboard shows at a glance."""

    at_wall_s: float
    version: str
    status: Status
    in_flight: int
    prompt_tokens: int
    cached_tokens: int
    requests: dict[str, float]
    errors: dict[str, float]
    recomputed_tokens: dict[str, float]
    by_turn: list[TurnCurvePoint]
    recent_moves: list[MoveAnswer]
    recent_sessions: list[RecentSession]
    groups: list[GroupAnswer]
    ring: list[RingShare]
