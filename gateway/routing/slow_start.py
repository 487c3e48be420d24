"""New sessions for backends in their slow start: few at first, growing to a fair share.

A backend that has just joined, or restarted, costs more than any other for a popular system prompt, because
it would have to compute it. By price alone it might get its first session only when the others are busy. So
each new session in the fleet gives a joining backend credit for its share, and one whole credit buys one
session. The first session warms the backend up, and from then on prices are fair.

Invariant: credit is between 0 and 2, so that a quiet time is not made up for in a burst. Knows no clock: the
shares come from the candidates.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

_MOST_CREDIT = 2.0


class SlowStart:
    """Credit of joining backends, by slot."""

    __slots__ = ("_credit",)

    def __init__(self) -> None:
        self._credit: dict[int, float] = {}

    def owed(self, slots: Container[int]) -> int | None:
        """Return the slot that the next new session is owed to, or None."""
        ripe = [slot for slot, credit in self._credit.items() if credit >= 1.0]
        if not ripe:
            return None
        owed = [slot for slot in ripe if slot in slots]
        return max(owed, key=lambda slot: (self._credit[slot], -slot), default=None)

    def note_new_session(self, chosen: int, warming: Mapping[int, float]) -> None:
        """Give each warming slot its part of one session; the chosen slot pays. Changes the credit."""
        credit = self._credit
        if not credit.keys() <= warming.keys():
            for slot in credit.keys() - warming.keys():
                del credit[slot]  # warm now, or gone
        for slot, part in warming.items():
            value = credit.get(slot, 0.0) + part
            credit[slot] = value if value < _MOST_CREDIT else _MOST_CREDIT
        if chosen in credit:
            credit[chosen] = max(0.0, credit[chosen] - 1.0)
