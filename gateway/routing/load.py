"""Load per backend: work sent and not yet prefilled, requests in flight, recent work.

Columns indexed by slot (a small integer that a backend keeps while it is in the fleet), because the
least of 64 waits must cost a microsecond. Work is prefill seconds: requests are counted only to break
ties and for the load bound, since one request may cost a thousand times another.

`recent` is an exponential average over `recent_work_window_s`, kept in forward-decayed units: a value
added at time t is multiplied by exp((t - origin) / window) instead of decaying all others, so columns
compare directly and only a rebase (every ten windows) touches all of them.

Invariants: nothing is negative; wait and in-flight return to exactly zero when all is released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.routing.settings import RoutingSettings


class LoadTable:
    """All columns; grows with the slots. Every method that changes it says so."""

    __slots__ = (
        "_foreign_until_s",
        "_foreign_wait",
        "_last_prefilled_s",
        "_origin_s",
        "_own_wait",
        "_stale_s",
        "_window_s",
        "adopted",
        "foreign_requests",
        "in_flight",
        "recent",
        "turn",
        "unanswered",
        "wait",
    )

    def __init__(self, settings: RoutingSettings) -> None:
        self._window_s = settings.recent_work_window_s
        self._stale_s = settings.load_stale_s
        self._origin_s: float | None = None
        self._own_wait: list[float] = []
        self._last_prefilled_s: list[float] = []
        self._foreign_wait: list[float] = []
        self._foreign_until_s: list[float] = []
        self.foreign_requests: list[int] = []
        self.wait: list[float] = []  # own and foreign prefill seconds ahead of a new request
        self.in_flight: list[int] = []
        self.unanswered: list[int] = []  # in flight without a first token
        self.recent: list[float] = []
        self.adopted: list[int] = []  # sessions of lost homes taken in
        self.turn: list[float] = []  # virtual time of the fair rotation among equal backends

    def open_slot(self, slot: int) -> None:
        """Start (or restart) the columns of a slot at zero. Changes the table."""
        while len(self.wait) <= slot:
            for column in (self._own_wait, self._foreign_wait, self._foreign_until_s, self.wait, self.recent):
                column.append(0.0)
            self.turn.append(0.0)
            self.adopted.append(0)
            self._last_prefilled_s.append(float("-inf"))
            for counts in (self.in_flight, self.unanswered, self.foreign_requests):
                counts.append(0)
        self._own_wait[slot] = self._foreign_wait[slot] = self._foreign_until_s[slot] = 0.0
        self.wait[slot] = self.recent[slot] = self.turn[slot] = 0.0
        self.in_flight[slot] = self.unanswered[slot] = self.foreign_requests[slot] = 0
        self.adopted[slot] = max(self.adopted)  # nothing to catch up on

    def stored(self, work_s: float, now_s: float) -> float:
        """Return what work of this moment weighs in the units of `recent`. Changes nothing."""
        age = 0.0 if self._origin_s is None else (now_s - self._origin_s) / self._window_s
        return work_s * math.exp(min(50.0, max(0.0, age)))

    def _scale(self, now_s: float) -> float:
        if self._origin_s is None:
            self._origin_s = now_s
        age = (now_s - self._origin_s) / self._window_s
        if age > 10.0:
            factor = math.exp(-age)
            self.recent[:] = [value * factor for value in self.recent]
            self._origin_s, age = now_s, 0.0
        return math.exp(max(0.0, age))

    def seed(self, joining: Sequence[int], open_slots: Sequence[int], share: float) -> None:
        """Give joining slots a share of the others' mean recent work, and the latest turn. Changes the table.

        With no recent work they would get every new session until they had caught up.
        """
        settled = [slot for slot in open_slots if slot not in joining]
        if not settled:
            return
        mean = sum(self.recent[slot] for slot in settled) / len(settled)
        latest = max(self.turn[slot] for slot in settled)
        for slot in joining:
            self.recent[slot] = max(self.recent[slot], mean * share)
            self.turn[slot] = max(self.turn[slot], latest)

    def send(self, slot: int, prefill_s: float, share: float, now_s: float) -> None:
        """Count a request of this work to the slot; `share` is its effective weight. Changes the table."""
        self.in_flight[slot] += 1
        self.unanswered[slot] += 1
        self._own_wait[slot] += prefill_s
        self.wait[slot] = self._own_wait[slot] + self._foreign_wait[slot]
        added = prefill_s * self._scale(now_s)  # before the column is looked at: it may be rebased
        self.recent[slot] += added
        self.turn[slot] += 1.0 / share

    def service_s(self, slot: int, sent_s: float, now_s: float) -> float | None:
        """Return how long the prefill that ends now has taken. Changes the table (it ended now).

        Prefills of one backend follow each other, so this one began when it was sent or when the one
        before it ended, whichever is later. None while others put load there that we cannot see.
        """
        began_s = max(sent_s, self._last_prefilled_s[slot])
        self._last_prefilled_s[slot] = max(now_s, self._last_prefilled_s[slot])
        return None if self._foreign_wait[slot] else max(0.0, now_s - began_s)

    def prefilled(self, slot: int, prefill_s: float) -> None:
        """The work of one request is done, or will never be. Changes the table."""
        self.unanswered[slot] -= 1
        # exactly zero when nothing is outstanding: sums of floats drift
        own = self._own_wait[slot] - prefill_s if self.unanswered[slot] else 0.0
        self._own_wait[slot] = own if own > 0.0 else 0.0
        self.wait[slot] = self._own_wait[slot] + self._foreign_wait[slot]

    def done(self, slot: int) -> None:
        self.in_flight[slot] -= 1

    def observe_foreign(
        self, slot: int, num_running: int, num_waiting: int, mean_prefill_s: float, now_s: float
    ) -> None:
        """Take over scraped engine load: what exceeds our own was put there by others. Changes the table."""
        others_waiting = max(0, num_waiting - self.unanswered[slot])
        self.foreign_requests[slot] = max(0, num_running + num_waiting - self.in_flight[slot])
        self._foreign_wait[slot] = others_waiting * mean_prefill_s
        self._foreign_until_s[slot] = now_s + self._stale_s
        self.wait[slot] = self._own_wait[slot] + self._foreign_wait[slot]

    def take_foreign(self, slot: int, work_s: float, num_requests: int, now_s: float) -> None:
        """Take over the load that other replicas report themselves; better known than scraped. Changes it."""
        self.foreign_requests[slot] = num_requests
        self._foreign_wait[slot] = work_s
        self._foreign_until_s[slot] = now_s + self._stale_s
        self.wait[slot] = self._own_wait[slot] + self._foreign_wait[slot]

    def expire_foreign(self, now_s: float) -> None:
        """Forget scraped load that nobody has refreshed. Changes the table. O(slots), call seldom."""
        for slot, until_s in enumerate(self._foreign_until_s):
            if until_s and now_s > until_s:
                self._foreign_until_s[slot] = self._foreign_wait[slot] = 0.0
                self.foreign_requests[slot] = 0
                self.wait[slot] = self._own_wait[slot]

    def outstanding_s(self, slot: int) -> float:
        return self._own_wait[slot]
