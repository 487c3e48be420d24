"""What a change of the fleet would move: arithmetic on two rings and the live bindings.

New sessions: the share of all keys whose first backend on the ring changes. This is exact, from the lengths
of the arcs between ring points. Live sessions stay at home when backends are added or reweighted, because a
binding holds. Only the sessions of a removed backend move; they are counted at the ring's next choice. Load
is ignored, so single sessions may go elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gateway.routing.ring import Ring
from gateway.values import BackendId, SessionKey

_WHOLE = 2.0**64


@dataclass(slots=True, kw_only=True)
class BackendForecast:
    """One backend before and after the change."""

    ring_share_before: float = 0.0
    ring_share_after: float = 0.0
    sessions_before: int = 0
    sessions_after: int = 0
    tokens_before: int = 0
    tokens_after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a change would move."""

    ring_share_moved: float
    num_sessions: int
    num_sessions_moved: int
    num_tokens: int
    num_tokens_moved: int
    backends: Mapping[BackendId, BackendForecast]


@dataclass(slots=True)
class _Sums:
    sessions: int = 0
    sessions_moved: int = 0
    tokens: int = 0
    tokens_moved: int = 0
    backends: dict[BackendId, BackendForecast] = field(default_factory=dict)


def ring_shares(ring: Ring) -> dict[BackendId, float]:
    """Return each backend's share of all keys, by first choice; the sum is 1. O(points)."""
    shares: dict[BackendId, float] = {}
    for start, end, owner in _arcs(ring):
        shares[owner] = shares.get(owner, 0.0) + (end - start) / _WHOLE
    return shares


def moved_share(before: Ring, after: Ring) -> float:
    """Return the share of all keys whose first choice differs. O(points of both)."""
    if not len(before) or not len(after):
        return 0.0 if len(before) == len(after) else 1.0
    ours, theirs = _arcs(before), _arcs(after)
    moved = place = 0
    i = j = 0
    while i < len(ours) and j < len(theirs):
        end = min(ours[i][1], theirs[j][1])
        if ours[i][2] != theirs[j][2]:
            moved += end - place
        place = end
        i += ours[i][1] == end
        j += theirs[j][1] == end
    return moved / _WHOLE


def forecast(
    before: Mapping[BackendId, float],
    after: Mapping[BackendId, float],
    virtual_nodes: int,
    sessions: Iterable[tuple[SessionKey, BackendId, int]],
) -> Forecast:
    """Forecast a change of weights. `sessions`: key, home and context tokens of each live session."""
    old_ring, new_ring = Ring(before, virtual_nodes), Ring(after, virtual_nodes)
    sums = _Sums(
        backends={backend_id: BackendForecast() for backend_id in sorted(before.keys() | after.keys())}
    )
    for backend_id, share in ring_shares(old_ring).items():
        sums.backends[backend_id].ring_share_before = share
    for backend_id, share in ring_shares(new_ring).items():
        sums.backends[backend_id].ring_share_after = share
    for key, home, tokens in sessions:
        _add_session(sums, after, new_ring, key, home, tokens)
    return Forecast(
        ring_share_moved=moved_share(old_ring, new_ring),
        num_sessions=sums.sessions,
        num_sessions_moved=sums.sessions_moved,
        num_tokens=sums.tokens,
        num_tokens_moved=sums.tokens_moved,
        backends=sums.backends,
    )


def _add_session(
    sums: _Sums,
    after: Mapping[BackendId, float],
    new_ring: Ring,
    key: SessionKey,
    home: BackendId,
    tokens: int,
) -> None:
    old = sums.backends.setdefault(home, BackendForecast())
    old.sessions_before += 1
    old.tokens_before += tokens
    sums.sessions += 1
    sums.tokens += tokens
    new_home: BackendId | None = home
    if home not in after:
        sums.sessions_moved += 1
        sums.tokens_moved += tokens
        new_home = next(new_ring.walk(key), None)
    if new_home is not None:
        new = sums.backends[new_home]
        new.sessions_after += 1
        new.tokens_after += tokens


def _arcs(ring: Ring) -> list[tuple[int, int, BackendId]]:
    """Return (start, end, owner) of all arcs. A point owns the keys before it, the first also the rest."""
    arcs: list[tuple[int, int, BackendId]] = []
    place = 0
    for position, owner in ring.points():
        arcs.append((place, position, owner))
        place = position
    if arcs:
        arcs.append((place, 2**64, arcs[0][2]))
    return arcs
