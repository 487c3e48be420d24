"""New sessions for backends in their slow start: few at first, growing to a fair share.

A backend that has just joined, or restarted, costs more than any other for a popular system prompt, because
it would have to compute it. By price alone it might get its first session only when the others are busy. So
each new session in the fleet gives a joining backend credit for its share, and one whole credit buys one
session. The first session warms the backend up, and from then on prices are fair.

Invariant: credit is between 0 and 2, so that a quiet time is not made up for in a burst. Knows no clock: the
shares come from the candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_MOST_CREDIT = 2.0


class SlowStart:
    """Credit of joining backends, by slot."""

    __slots__ = ("_credit",)

    def __init__(self) -> None:
        self._credit: dict[int, float] = {}

    def owed(self, slots: Iterable[int]) -> int | None:
        """Return the slot that the next new session is owed to, or None."""
        if not self._credit:
            return None
        best = max(slots, key=lambda slot: (self._credit.get(slot, 0.0), -slot), default=None)
        return best if best is not None and self._credit.get(best, 0.0) >= 1.0 else None

    def note_new_session(self, chosen: int, warming: Mapping[int, float], total_share: float) -> None:
        """Give each warming slot its share of one session; the chosen slot pays. Changes the credit."""
        credit = self._credit
        for slot in [slot for slot in credit if slot not in warming]:
            del credit[slot]  # warm now, or gone
        for slot, share in warming.items():
            credit[slot] = min(_MOST_CREDIT, credit.get(slot, 0.0) + share / total_share)
        if chosen in credit:
            credit[chosen] = max(0.0, credit[chosen] - 1.0)
