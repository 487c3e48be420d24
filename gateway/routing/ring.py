"""The consistent-hash ring: which backends come first for a key, in whatever order they are configured.

Invariant: the ring is a pure function of the set of (backend id, weight). Two replicas with the same fleet
agree on every key, and removing a backend moves only the keys that it owned. A ring is built as a whole and
then swapped, never changed. uhashring computes the points; lookups are a bisection here, because finding the
n-th distinct successor needs the points themselves.

Only the ratio of weights matters, so their size must not: where the largest would give a backend more than
`MAX_BACKEND_POINTS`, or all together more than `MAX_POINTS`, every backend gets proportionally fewer points.
A change of the largest weight then moves keys of others too, in proportion.

It knows no health and no load: callers skip the backends that they cannot use.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Final

import xxhash
from uhashring import HashRing

from gateway.values import BackendId


def key_hash(key: str) -> int:
    """Return the position of a key or a virtual node on the ring: 64 bits, the same on every machine.

    `surrogatepass`, because JSON can bring a lone surrogate into an id, and no text may fail here.
    """
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))


MAX_BACKEND_POINTS: Final = 4_096
"""About 10 ms to compute. With 160 virtual nodes, weights up to 25.6 are below."""
MAX_POINTS: Final = 262_144


@lru_cache(maxsize=2_048)
def _points_of(backend_id: BackendId, num_points: int) -> array[int]:
    """Return a backend's points in order. They do not depend on other backends, so they are cached: 8 bytes
    each, at most 64 MiB."""
    ring = HashRing({backend_id: {"vnodes": num_points}}, hash_fn=key_hash)
    return array("Q", (position for position, _ in ring.get_points()))


def _points_per_weight(weights: Sequence[float], virtual_nodes: int) -> float:
    """`virtual_nodes`, or less where that would be too many points."""
    if not weights:
        return virtual_nodes
    return min(virtual_nodes, MAX_BACKEND_POINTS / max(weights), MAX_POINTS / sum(weights))


class Ring:
    """Successors of a key among weighted backends; immutable once built.

    Building is O(points log backends): the points of each backend are a sorted run, and Python's sort merges
    runs. Requests wait meanwhile: one change among 64 backends takes 5 ms of CPU time, among 1,000 a quarter
    of a second (with all points inserted into one HashRing each time: 25 and 650 ms).
    """

    __slots__ = ("_nodes", "_num_backends", "_points")

    def __init__(self, weights: Mapping[BackendId, float], virtual_nodes: int) -> None:
        owner_of: dict[int, BackendId] = {}
        backend_ids = sorted(backend_id for backend_id, weight in weights.items() if weight > 0)
        points_per_weight = _points_per_weight([weights[name] for name in backend_ids], virtual_nodes)
        for backend_id in backend_ids:
            num_points = max(1, round(points_per_weight * weights[backend_id]))
            owner_of.update(dict.fromkeys(_points_of(backend_id, num_points), backend_id))
        self._points = sorted(owner_of)
        self._nodes = [owner_of[point] for point in self._points]
        self._num_backends = len(backend_ids)

    def __repr__(self) -> str:
        return f"<Ring {self._num_backends} backends, {len(self._points)} points>"

    def __len__(self) -> int:
        return self._num_backends

    def points(self) -> Iterator[tuple[int, BackendId]]:
        """Yield the points in order, each with the backend that owns the keys before it."""
        return zip(self._points, self._nodes, strict=True)

    def walk(self, key: str) -> Iterator[BackendId]:
        """Yield each backend once, in ring order from the key's position."""
        num_points = len(self._points)
        if not num_points:
            return
        start = bisect_left(self._points, key_hash(key))
        seen: set[BackendId] = set()
        nodes = self._nodes
        for offset in range(num_points):
            node = nodes[(start + offset) % num_points]
            if node not in seen:
                seen.add(node)
                yield node
                if len(seen) == self._num_backends:
                    return

    def owners(
        self, key: str, count: int, allowed: AbstractSet[int] | None, slot_of: Mapping[BackendId, int]
    ) -> list[int]:
        """Return the first `count` distinct slots for the key, only allowed ones if given."""
        points, nodes = self._points, self._nodes
        found: list[int] = []
        if not points or not count:
            return found
        start, size = bisect_left(points, key_hash(key)), len(nodes)
        for place in range(start, start + size):
            slot = slot_of[nodes[place if place < size else place - size]]
            if (allowed is None or slot in allowed) and slot not in found:
                found.append(slot)
                if len(found) >= count:
                    break
        return found
