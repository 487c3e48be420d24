"""What each backend's cache holds, as far as a gateway can know: a prefix tree with leaf-first LRU.

A prompt is a chain of messages whose hashes are chained. So one hash names a whole prefix, and a line (one
message on one backend) is found by its hash, without a walk from the root. Like an engine, a backend is
assumed to keep a line only together with all lines before it, and to drop the least recently used *leaf*
first, from its end (traces study, section 2). A line is entered when its request is routed, not when it is
answered: what is queued will be cached before anything that is sent after it.

    chain     m0 ---- m1 ---- m2 ---- m3        one request, cumulative sizes end0 < end1 < end2 < end3
    line      start = end1, size = m2, kept <= size, tail = answer generated behind it

Only leaves are in the recency order. A parent whose last child is dropped becomes the *oldest* leaf, because
it was last used when that child was. So this equals a block-level LRU without touching whole paths, and a
follow-up turn costs O(new messages), not O(history). One difference is accepted: a prompt that is the
beginning of a longer known one (an old turn sent again) does not outlive the longer one.

Sizes are bytes of text. Capacity is in bytes too (tokens / tokens per byte), and the caller adjusts it.

Invariants: `used_bytes` of a backend is the sum of what its lines keep. A bit in `_holders` is set exactly
where a line exists. It knows no load, no clock, and no text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from gateway.values import Message, RequestFacts

Chain = Sequence[Message]
Level = tuple[tuple[int, ...], int]  # slots, and how many leading bytes of a chain each of them holds
_GHOST_SHARE = 0.5  # evictions remembered, as a share of capacity: what 1.5 times the cache would still hold
_LAST_LOOKS = 4  # the next turn adds 2-3 messages to the known ones: look there before bisecting
_EXACT_GROUP = 8  # if more backends share a line, it is a common prompt: they count as equal


class ContentIndex(Protocol):
    """Knowledge of cached prefixes. Queries change nothing; `cached_bytes` never exceeds the chain."""

    def cached_bytes(self, slot: int, chain: Chain) -> int:
        """Return how many leading bytes of the chain the backend in this slot holds."""
        ...

    def levels(self, chain: Chain) -> list[Level]:
        """Return (slots, cached bytes) of all backends that hold some of the chain, longest first."""
        ...

    def free_bytes(self, slot: int) -> int:
        """Return how many more bytes the backend takes before it drops any."""
        ...


class _Line:
    __slots__ = ("children", "kept", "key", "parent", "size", "start", "tail")

    def __init__(self, key: int, parent: _Line | None, start: int, size: int) -> None:
        self.key = key
        self.parent = parent
        self.start = start
        self.size = size
        self.kept = size
        self.tail = 0
        self.children = 0


class _Cache:
    """The believed content of one backend."""

    __slots__ = ("capacity", "ghost_bytes", "ghosts", "leaves", "lines", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.lines: dict[int, _Line] = {}
        self.leaves: OrderedDict[int, _Line] = OrderedDict()
        self.ghosts: OrderedDict[int, int] = OrderedDict()
        self.ghost_bytes = 0


class Shadow:
    """Believed cache content of every backend, by slot. Implements `ContentIndex`."""

    def __init__(self, max_lines_per_backend: int) -> None:
        self._max_lines = max_lines_per_backend
        self._caches: dict[int, _Cache] = {}
        self._holders: dict[int, int] = {}  # chain hash -> bit set of slots

    def __repr__(self) -> str:
        used = sum(cache.used for cache in self._caches.values())
        capacity = sum(cache.capacity for cache in self._caches.values())
        return f"<Shadow {len(self._holders)} lines of {len(self._caches)} backends, {used}/{capacity} bytes>"

    # -- queries -------------------------------------------------------------------------------

    def cached_bytes(self, slot: int, chain: Chain) -> int:
        cache = self._caches.get(slot)
        if cache is None:
            return 0
        index = _deepest(cache.lines, chain)
        return 0 if index < 0 else _held(cache.lines[chain[index].chain_hash], chain, index)

    def levels(self, chain: Chain) -> list[Level]:
        holders = self._holders
        found: list[Level] = []
        index, taken = _deepest(holders, chain), 0
        while index >= 0:
            mask = holders.get(chain[index].chain_hash)
            if mask is None:  # two prefixes under one hash: what is known of the longer one counts
                break
            fresh = mask & ~taken
            key, slots = chain[index].chain_hash, _slots(fresh)
            if len(slots) <= _EXACT_GROUP:
                found.extend(((s,), _held(self._caches[s].lines[key], chain, index)) for s in slots)
            else:
                line = self._caches[slots[0]].lines[key]
                found.append((slots, line.start + line.size))
            taken |= fresh
            index = self._next_wider(chain, index, mask)
        return found

    def _next_wider(self, chain: Chain, index: int, mask: int) -> int:
        """Return the deepest position before `index` that more backends hold, or -1. O(log n)."""
        holders = self._holders
        first = bisect_right(
            range(index + 1), -1, key=lambda i: -1 if holders.get(chain[i].chain_hash) != mask else 0
        )
        return first - 1

    def holds(self, slot: int, key: int) -> bool:
        """Whether the backend holds a message, and with it all that is before it."""
        cache = self._caches.get(slot)
        return cache is not None and key in cache.lines

    def num_lines(self, slot: int) -> int:
        cache = self._caches.get(slot)
        return 0 if cache is None else len(cache.lines)

    def used_bytes(self, slot: int) -> int:
        cache = self._caches.get(slot)
        return 0 if cache is None else cache.used

    def free_bytes(self, slot: int) -> int:
        cache = self._caches.get(slot)
        return 0 if cache is None else max(0, cache.capacity - cache.used)

    # -- changes -------------------------------------------------------------------------------

    def set_capacity(self, slot: int, capacity_bytes: int) -> None:
        """Set how much the backend can hold; drops what no longer fits. Changes the content."""
        cache = self._caches.get(slot)
        if cache is None:
            self._caches[slot] = _Cache(capacity_bytes)
        else:
            cache.capacity = capacity_bytes
            self._shrink(slot, cache)

    def insert(self, slot: int, chain: Chain) -> tuple[int, int]:
        """Enter a chain that is sent to this backend. Changes the content.

        Returns (bytes written, bytes among them that were dropped here not long ago).
        """
        cache = self._caches[slot]
        lines, bit = cache.lines, 1 << slot
        index = _deepest(lines, chain)
        parent = lines[chain[index].chain_hash] if index >= 0 else None
        written = regretted = 0
        if parent is not None:
            written = parent.size - parent.kept
            parent.kept = parent.size
            if index + 1 < len(chain) and parent.tail:
                written -= parent.tail  # the answer becomes the start of the next message
                parent.tail = 0
            if not parent.children:
                cache.leaves.move_to_end(parent.key)
        start = 0 if parent is None else parent.start + parent.size
        for position in range(index + 1, len(chain)):
            message = chain[position]
            key = message.chain_hash
            known = lines.get(key)
            if known is not None:  # two prefixes under one hash: bad input, never a broken tree
                if parent is not None and not parent.children:
                    cache.leaves[parent.key] = parent
                parent = known
                continue
            line = _Line(key, parent, start, message.num_bytes)
            lines[key] = line
            if parent is not None:
                if not parent.children:
                    cache.leaves.pop(parent.key, None)
                parent.children += 1
            self._holders[key] = self._holders.get(key, 0) | bit
            written += line.size
            start += line.size
            ghost = cache.ghosts.pop(key, 0)
            if ghost:
                cache.ghost_bytes -= ghost
                regretted += ghost
            parent = line
        if parent is not None and not parent.children:
            cache.leaves[parent.key] = parent
        cache.used += written
        if cache.used > cache.capacity or len(lines) > self._max_lines:
            self._shrink(slot, cache)
        return max(0, written), regretted

    def add_answer(self, slot: int, chain: Chain, num_bytes: int) -> None:
        """Enter the answer generated behind the chain. Changes the content; ignores a dropped chain."""
        cache = self._caches.get(slot)
        line = None if cache is None or not chain else cache.lines.get(chain[-1].chain_hash)
        if cache is None or line is None or line.children or line.kept < line.size:
            return
        cache.used += num_bytes - line.tail
        line.tail = num_bytes
        if cache.used > cache.capacity:
            self._shrink(slot, cache)

    def forget(self, slot: int) -> None:
        """Forget what this backend holds, as after a restart. Changes the content. O(lines)."""
        cache = self._caches.get(slot)
        if cache is None:
            return
        for key in cache.lines:
            self._clear_bit(key, slot)
        self._caches[slot] = _Cache(cache.capacity)

    def remove(self, slot: int) -> None:
        """Forget the backend itself. Changes the content."""
        self.forget(slot)
        self._caches.pop(slot, None)

    def _clear_bit(self, key: int, slot: int) -> None:
        mask = self._holders[key] & ~(1 << slot)
        if mask:
            self._holders[key] = mask
        else:
            del self._holders[key]

    def _shrink(self, slot: int, cache: _Cache) -> None:
        """Drop the oldest leaves, from their ends, until the content fits."""
        while (over := cache.used - cache.capacity) > 0 or len(cache.lines) > self._max_lines:
            if not cache.leaves:
                return
            key, line = next(iter(cache.leaves.items()))
            if line.tail:
                cache.used -= line.tail
                line.tail = 0
                continue
            if line.kept > over and len(cache.lines) <= self._max_lines:
                line.kept -= over
                cache.used -= over
                self._remember_dropped(cache, key, over)
                return
            self._drop_leaf(slot, cache, key, line)

    def _drop_leaf(self, slot: int, cache: _Cache, key: int, line: _Line) -> None:
        del cache.leaves[key]
        del cache.lines[key]
        self._clear_bit(key, slot)
        cache.used -= line.kept
        self._remember_dropped(cache, key, line.kept)
        parent = line.parent
        if parent is None:
            return
        parent.children -= 1
        if not parent.children:
            parent_key = parent.key
            cache.leaves[parent_key] = parent
            cache.leaves.move_to_end(parent_key, last=False)

    def _remember_dropped(self, cache: _Cache, key: int, num_bytes: int) -> None:
        cache.ghosts[key] = cache.ghosts.pop(key, 0) + num_bytes
        cache.ghost_bytes += num_bytes
        limit = cache.capacity * _GHOST_SHARE
        while cache.ghosts and (cache.ghost_bytes > limit or len(cache.ghosts) > self._max_lines):
            cache.ghost_bytes -= cache.ghosts.popitem(last=False)[1]


def session_line(facts: RequestFacts, num_bytes: int) -> Chain:
    """Return the session itself as one line as large as the prompt, where no messages name a prefix."""
    if facts.session_key is None:
        return ()
    return (Message(chain_hash=int(facts.session_key[:15], 16), num_bytes=num_bytes),)


def _held(line: _Line, chain: Chain, index: int) -> int:
    """Bytes of the chain that this line and all before it cover, with the answer behind it."""
    held = line.start + line.kept
    if line.tail and index + 1 < len(chain):
        held += min(line.tail, chain[index + 1].num_bytes)
    return held


def _deepest(known: dict[int, _Line] | dict[int, int], chain: Chain) -> int:
    """Return the last known position of the chain, or -1. The known positions are a prefix."""
    last = len(chain) - 1
    for index in range(last, max(-1, last - _LAST_LOOKS), -1):
        if chain[index].chain_hash in known:
            return index
    low, high = 0, max(0, last - _LAST_LOOKS + 1)
    while low < high:
        middle = (low + high) // 2
        if chain[middle].chain_hash in known:
            low = middle + 1
        else:
            high = middle
    return low - 1


@lru_cache(maxsize=4096)
def _slots(mask: int) -> tuple[int, ...]:
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(found)
