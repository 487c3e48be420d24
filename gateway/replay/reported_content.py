"""Cache content as engines report it, completed by what this router has sent and they have not run yet.

Engine events say what is cached now. A prompt in a queue is not cached yet, so ten requests for one new
document would all go to different backends. The shadow knows that the first request will have filled the
cache when the second one runs (traces study, 3.1). So the longer of both counts.
"""

from __future__ import annotations

from gateway.routing.shadow import Chain, ContentIndex, Level


class CompletedContent:
    """The longer answer of two indexes. Implements `ContentIndex`."""

    __slots__ = ("_reported", "_sent")

    def __init__(self, reported: ContentIndex, sent: ContentIndex) -> None:
        self._reported = reported
        self._sent = sent

    def cached_bytes(self, slot: int, chain: Chain) -> int:
        return max(self._reported.cached_bytes(slot, chain), self._sent.cached_bytes(slot, chain))

    def free_bytes(self, slot: int) -> int:
        return min(self._reported.free_bytes(slot), self._sent.free_bytes(slot))

    def levels(self, chain: Chain) -> list[Level]:
        longest: dict[int, int] = {}
        for slots, num_bytes in (*self._reported.levels(chain), *self._sent.levels(chain)):
            for slot in slots:
                if num_bytes > longest.get(slot, 0):
                    longest[slot] = num_bytes
        ordered = sorted(longest, key=lambda slot: (-longest[slot], slot))
        return [((slot,), longest[slot]) for slot in ordered]
