"""What replicas tell each other about the requests that they have sent, so that all know what is cached.

A replica sees its own requests only. With R of them each would believe that a backend holds a part of what it
holds, that it has room which it has not, and that its traffic is a part of what it is. So each tells what it
has sent, about once a second, and enters what the others tell like its own requests: in the shadow, in the
traffic, in the recent work. Loads travel apart (`Router.observe_others`), because they must be fresh.

Of a prompt that goes on only its last messages are told. Whoever does not know what comes before them,
because rounds were lost, leaves them out: a shadow knows a message only with all that is before it.

Invariants: bounded; no clock and no I/O; what others tell may be wrong or hostile, and then costs a cache
miss.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from gateway.routing.placement_request import RoutingState
from gateway.routing.reservation import Reservation
from gateway.routing.shadow import Shadow
from gateway.values import Affinity, BackendId, Message, Name

MAX_PLACED: Final = 2_000
"""Requests told in one round; the latest count."""
_MAX_LINES: Final = 64  # messages told of one prompt
_NEW_LINES: Final = 8  # of one that goes on
_MAX_LINES_IN_ALL: Final = 20_000
_MAX_BYTES: Final = 1 << 32
_MAX_WORK_S: Final = 1e5
_MAX_HASH: Final = 1 << 64


class Placed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request that was sent."""

    backend: int  # its place in `News.backends`
    before: int  # hash of the prompt before `lines`; 0: nothing is before them
    lines: tuple[tuple[int, int], ...]  # hash and bytes of its last messages
    work_s: float  # its prefill at the default speed


class News(msgspec.Struct, frozen=True, array_like=True):
    """What one replica tells in one round."""

    backends: tuple[Name, ...] = ()
    placed: tuple[Placed, ...] = ()


class Exchange:
    """Collects the news of this replica, and enters those of others."""

    __slots__ = ("_candidates", "_costs", "_load", "_noted", "_shadow", "_traffic", "is_collecting")

    def __init__(self, state: RoutingState, shadow: Shadow) -> None:
        self._candidates, self._costs = state.candidates, state.costs
        self._load, self._traffic, self._shadow = state.load, state.traffic, shadow
        self._noted: deque[Reservation] = deque(maxlen=MAX_PLACED)
        self.is_collecting = False  # set where there are other replicas

    def note(self, sent: list[Reservation]) -> None:
        """Remember requests to tell of."""
        if self.is_collecting:
            self._noted.extend(sent)

    def take(self) -> News:
        """Return what was noted since the last call."""
        places, placed, num_lines = dict[BackendId, int](), deque[Placed](), 0
        while self._noted and num_lines < _MAX_LINES_IN_ALL:
            reservation = self._noted.pop()
            if reservation.chain:
                place = places.setdefault(reservation.backend_id, len(places))
                placed.appendleft(self._placed(reservation, place))
                num_lines += len(placed[0].lines)
        self._noted.clear()
        return News(tuple(places), tuple(placed))

    def _placed(self, reservation: Reservation, place: int) -> Placed:
        chain = reservation.chain
        num_lines = _NEW_LINES if reservation.affinity is Affinity.HIT else _MAX_LINES
        early, late = chain[:-num_lines], chain[-num_lines:]
        return Placed(
            backend=place,
            before=early[-1].chain_hash if early else 0,
            lines=tuple((message.chain_hash, message.num_bytes) for message in late),
            work_s=reservation.prefill_s / self._costs.models[reservation.slot].scale,
        )

    def enter(self, news: News, now_s: float) -> None:
        """Enter what another replica has sent. Changes shadow, traffic and recent work."""
        slots = [self._candidates.slot_of.get(BackendId(name)) for name in news.backends]
        weights, models = self._candidates.weights, self._costs.models
        arrivals, recent = [], []
        for placed in news.placed[-MAX_PLACED:]:
            slot = slots[placed.backend] if 0 <= placed.backend < len(slots) else None
            if slot is None or not _is_plausible(placed):
                continue
            chain = tuple([Message(chain_hash=key, num_bytes=size) for key, size in placed.lines])
            written = regretted = 0
            if not placed.before:
                written, regretted = self._shadow.insert(slot, chain)
            elif self._shadow.holds(slot, placed.before):
                before = Message(chain_hash=placed.before, num_bytes=0)
                written, regretted = self._shadow.insert(slot, (before, *chain))
            arrivals.append((now_s, placed.work_s, written, regretted))
            recent.append((slot, placed.work_s * models[slot].scale, weights[slot] or 1.0, now_s))
        self._traffic.add_many(arrivals)
        self._load.add_recent(recent)


def _is_plausible(placed: Placed) -> bool:
    sizes = [size for _, size in placed.lines]
    keys = [placed.before, *[key for key, _ in placed.lines]]
    return (
        0 < len(placed.lines) <= _MAX_LINES
        and 0.0 <= placed.work_s <= _MAX_WORK_S
        and all(0 <= size < _MAX_BYTES for size in sizes)
        and all(0 <= key < _MAX_HASH for key in keys)
    )
