"""The answers of the admin API as types. They are encoded as they are, and the OpenAPI document describes
them.

Units are part of the names; `None` means not known or not applicable. Sessions are named by their key, a
hash. Times ending in `_wall_s` are Unix times.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.admin.operations import make_etag
from gateway.admin.order_answers import OrderAnswer
from gateway.admin.session_answers import MoveAnswer, SessionRow

# -- backends


class Prewarm(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of prewarming the sessions of a draining backend on other backends."""

    planned: int
    warmed: int
    failed: int
    is_done: bool


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """A drain in progress. It ends when no request runs and no session is bound, or at its deadline."""

    deadline_left_s: float
    in_flight: int
    sessions: int
    is_drained: bool
    prewarm: Prewarm | None


class RoutingBelief(msgspec.Struct, frozen=True, kw_only=True):
    """What routing knows and estimates about one backend."""

    in_flight: int
    outstanding_work_s: float
    wait_s: float
    shadow_lines: int
    shadow_tokens: int
    kv_usage: float | None
    shadow_trust: float
    found_empty: int  # how often its cache held next to nothing of what was expected
    prefill_tokens_per_s: float


class BackendAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One backend: its configuration, its observed state and routing's estimates."""

    id: str
    url: str
    engine: str
    state: str
    is_spared: bool  # in service though its probes or requests fail
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
    orders: list[OrderAnswer]

    def etag(self) -> str:
        """Covers what an operator can change, not values that change by themselves."""
        wish = self.state if self.state in ("draining", "cordoned") else ""
        return make_etag(self.id, self.url, self.engine, self.weight, self.labels, wish)


class BackendList(msgspec.Struct, frozen=True, kw_only=True):
    backends: list[BackendAnswer]


# -- fleet and process


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
    """This replica's counters since it started: requests by API, tokens by backend, the rest by cause."""

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
    """One gateway process, as reported by itself."""

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
    """This replica first, then others that share the session store and reported within the last seconds."""

    replicas: list[Replica]


class ConfigAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved configuration, with secrets masked."""

    config: dict[str, Any]


# -- decisions


class CandidateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    price: float | None  # None: infinite
    reason: str
    expected_cached_tokens: int
    wait_s: float
    prefill_s: float


class DecisionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with every candidate, best first."""

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
    """Each backend's share of the ring, and the owners of a key, first choice first."""

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

    New sessions follow the ring (load is not considered). Live sessions stay at home unless it is removed.
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
    """Requests with the same system prompt and tools, and the backends believed to hold it."""

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
    """A shared prefix that an engine keeps resident, as reported by the engine."""

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
    """A fleet-wide pin that one backend does not have, and the number of failed attempts."""

    name: str
    owner: str
    num_tries: int
    is_given_up: bool
    problem: str | None


class BackendPins(msgspec.Struct, frozen=True, kw_only=True):
    """The pins of one backend and those it does not have yet, or the reason why they are not known."""

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
    """All turns with the same number in their session; medians over the last few hundred."""

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
    """The data of the dashboard's overview."""

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
