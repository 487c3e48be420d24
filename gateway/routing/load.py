"""Load per backend: prefill work outstanding, requests in flight, recent work.

The table is columns indexed by slot (a small integer that a backend keeps while it is in the fleet), because
finding the least of 64 waits must take about a microsecond. Work is prefill seconds. Requests are counted
only for ties and for the load bound, since one request may cost a thousand times another.

`recent` is an exponential average over `recent_work_window_s`, in forward-decayed units: a value added at
time t is multiplied by exp((t - origin) / window), and nothing else decays. So columns compare directly, and
only a rebase (every ten windows) touches all of them.

Invariants: nothing is negative. Wait and in-flight counts return to exactly zero when everything is released.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gateway.routing.settings import RoutingSettings

MOST_CROWDING = 20.0


class LoadTable:
    """All columns. Grows with the slots."""

    __slots__ = (
        "_foreign_fresh_until_s",
        "_foreign_until_s",
        "_foreign_wait",
        "_last_prefilled_s",
        "_origin_s",
        "_own_wait",
        "_stale_s",
        "_window_s",
        "adopted",
        "crowding",
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
        self._foreign_fresh_until_s = math.inf  # nothing is stale before
        self.foreign_requests: list[int] = []
        self.wait: list[float] = []  # own and foreign prefill seconds ahead of a new request
        self.in_flight: list[int] = []
        self.unanswered: list[int] = []  # in flight without a first token
        self.recent: list[float] = []
        self.crowding: list[float] = []  # how much slower each running request makes the others: 1 / free KV
        self.adopted: list[int] = []  # sessions taken in after they lost their home
        self.turn: list[float] = []  # virtual time of a fair rotation among equal backends

    def open_slot(self, slot: int) -> None:
        """Set the columns of a slot to zero. Changes the table."""
        while len(self.wait) <= slot:
            for column in (self._own_wait, self._foreign_wait, self._foreign_until_s, self.wait, self.recent):
                column.append(0.0)
            self.turn.append(0.0)
            self.adopted.append(0)
            self.crowding.append(1.0)
            self._last_prefilled_s.append(float("-inf"))
            for counts in (self.in_flight, self.unanswered, self.foreign_requests):
                counts.append(0)
        self._own_wait[slot] = self._foreign_wait[slot] = self._foreign_until_s[slot] = 0.0
        self.wait[slot] = self.recent[slot] = self.turn[slot] = 0.0
        self.in_flight[slot] = self.unanswered[slot] = self.foreign_requests[slot] = 0
        self.crowding[slot] = 1.0
        self.adopted[slot] = max(self.adopted)  # nothing to catch up on

    def stored(self, work_s: float, now_s: float) -> float:
        """Return what work done now weighs in the units of `recent`."""
        age = 0.0 if self._origin_s is None else (now_s - self._origin_s) / self._window_s
        return work_s * math.exp(min(50.0, max(0.0, age)))

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

    def count_sent(self, slot: int, prefill_s: float) -> None:
        """Count a request with this work on the slot. Changes the table."""
        self.in_flight[slot] += 1
        self.unanswered[slot] += 1
        self._own_wait[slot] += prefill_s
        self.wait[slot] = self._own_wait[slot] + self._foreign_wait[slot]

    def add_recent(self, sent: Iterable[tuple[int, float, float, float]]) -> None:
        """Count work as recent: (slot, work, effective weight of the slot, time). Changes the table."""
        recent, turn, window_s = self.recent, self.turn, self._window_s
        for slot, prefill_s, share, now_s in sent:
            origin_s = self._origin_s
            if origin_s is None:
                origin_s = self._origin_s = now_s
            age = (now_s - origin_s) / window_s
            if age > 10.0:
                factor = math.exp(-age)
                recent[:] = [value * factor for value in recent]
                self._origin_s, age = now_s, 0.0
            recent[slot] += prefill_s * math.exp(max(0.0, age))
            turn[slot] += 1.0 / share

    def count_answered(self, slot: int, prefill_s: float, sent_s: float, now_s: float) -> float | None:
        """Remove the work of one request: it is done, or never will be. Changes the table.

        Returns how long its prefill took: since the request was sent, or since the one before it was
        prefilled if that was later. None while other replicas have load there, which we cannot see.
        """
        last_s = self._last_prefilled_s[slot]
        began_s = max(sent_s, last_s)
        self._last_prefilled_s[slot] = max(now_s, last_s)
        self.unanswered[slot] -= 1
        # exactly zero if nothing is outstanding, because sums of floats drift
        own = self._own_wait[slot] - prefill_s if self.unanswered[slot] else 0.0
        self._own_wait[slot] = own = own if own > 0.0 else 0.0
        foreign = self._foreign_wait[slot]
        self.wait[slot] = own + foreign
        return None if foreign else max(0.0, now_s - began_s)

    def done(self, slot: int) -> None:
        self.in_flight[slot] -= 1

    def observe_foreign(
        self, slot: int, num_running: int, num_waiting: int, mean_prefill_s: float, now_s: float
    ) -> None:
        """Take over scraped engine load: what exceeds ours is of other replicas. Changes the table."""
        others_waiting = max(0, num_waiting - self.unanswered[slot])
        num_others = max(0, num_running + num_waiting - self.in_flight[slot])
        self._set_foreign(slot, others_waiting * mean_prefill_s, num_others, now_s)

    def observe_kv(self, slot: int, usage: float, now_s: float) -> None:
        """Take over what share of its KV memory the requests on an engine use. Changes the table."""
        self.crowding[slot] = 1.0 / max(1.0 / MOST_CROWDING, 1.0 - usage) if usage > 0.0 else 1.0
        self._keep_until(slot, now_s + self._stale_s)

    def take_foreign(self, slot: int, work_s: float, num_requests: int, now_s: float) -> None:
        """Take over the load that other replicas report, which is more exact. Changes the table."""
        self._set_foreign(slot, work_s, num_requests, now_s)

    def expire_foreign(self, now_s: float) -> None:
        """Forget load of others that is stale. Changes the table.

        It looks at the slots only when one may be stale: about once per `load_stale_s`, however often it is
        called, because each load seen anew is stale that much later.
        """
        if now_s <= self._foreign_fresh_until_s:
            return
        fresh_until_s = math.inf
        for slot, until_s in enumerate(self._foreign_until_s):
            if not until_s:
                continue
            if now_s > until_s:
                self._foreign_until_s[slot] = self._foreign_wait[slot] = 0.0
                self.foreign_requests[slot] = 0
                self.crowding[slot] = 1.0
                self.wait[slot] = self._own_wait[slot]
            elif until_s < fresh_until_s:
                fresh_until_s = until_s
        self._foreign_fresh_until_s = fresh_until_s

    def _set_foreign(self, slot: int, wait_s: float, num_requests: int, now_s: float) -> None:
        self.foreign_requests[slot] = num_requests
        self._foreign_wait[slot] = wait_s
        self._keep_until(slot, now_s + self._stale_s)
        self.wait[slot] = self._own_wait[slot] + wait_s

    def _keep_until(self, slot: int, until_s: float) -> None:
        self._foreign_until_s[slot] = until_s
        if until_s < self._foreign_fresh_until_s:
            self._foreign_fresh_until_s = until_s

    def running(self, slot: int) -> int:
        """Return how many requests are past their prefill there, ours and those of others."""
        return self.in_flight[slot] - self.unanswered[slot] + self.foreign_requests[slot]

    def outstanding_s(self, slot: int) -> float:
        return self._own_wait[slot]
