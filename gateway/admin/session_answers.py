"""The answers of the admin API about sessions. See `answers.py`."""

from __future__ import annotations

import msgspec

from gateway.admin.operations import make_etag


class MoveAnswer(msgspec.Struct, frozen=True, kw_only=True):
    at_wall_s: float
    session: str
    before: str | None
    after: str
    reason: str


class TurnAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One turn that this replica served."""

    at_wall_s: float
    backend: str
    affinity: str
    reason: str
    prompt_tokens: int | None
    cached_tokens: int | None
    ttft_s: float | None
    status: int
    outcome: str


class StoryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What this replica remembers of a session. Turns served by other replicas are not included."""

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
    """A session, its home and its history."""

    story: StoryAnswer | None
    ignored_id: IgnoredIdAnswer | None


class IgnoredIdAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one id that this replica did not take for its session, because many conversations share the
    id (`shared`) or because ids of its header or field never repeat. Each is bound by its conversation."""

    requests: dict[str, int]
    last_seen_wall_s: float
    sessions: list[str]


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    sessions: list[SessionRow]
    next_cursor: str | None
    ignored_ids: list[IgnoredIdAnswer] = []  # what became of the id that was asked for
