"""How much a second of prefill costs everybody else: the pressure of the fleet's traffic.

A request with work p, sent to a backend with W seconds of work ahead, waits W + p itself. It also delays each
request that arrives before the backend is idle again. In a busy period of an M/G/1 queue these are

    rate · (W + p) / (1 - utilisation)

requests, each delayed by p. What is computed is also written to the cache and evicts other text: each token
written costs `regret` tokens recomputed later. So

    price = (W + p) · (1 + p · pressure),   pressure = rate · (1 + regret) / (1 - utilisation)

(traces study, 4.3 and the reference simulator). A policy that minimises the request's own delay alone
collapses near saturation: it saves seconds now by recomputation that everything behind it waits for.

Invariant: pressure is finite and not negative. Rates are means per backend over the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gateway.routing.settings import RoutingSettings

_MAX_UTILISATION = 0.95
_MAX_REGRET = 3.0
_REGRET_WINDOW_FACTOR = 5.0  # evictions are rarer than arrivals
_REGRET_WEIGHT = 2.0  # ghosts cover half a capacity; text from the other half is as likely to return


class Traffic:
    """Exponential averages of arrivals, work, bytes written and bytes regretted."""

    __slots__ = ("_arrivals", "_first_s", "_last_s", "_regretted", "_window_s", "_work", "_written", "regret")

    def __init__(self, settings: RoutingSettings) -> None:
        self._window_s = settings.traffic_window_s
        self._first_s: float | None = None
        self._last_s = 0.0
        self._arrivals = self._work = 0.0
        self._written = self._regretted = 0.0
        self.regret = 0.0  # tokens recomputed later per token written now

    def pressure(self, now_s: float, num_backends: int, scale: float = 1.0) -> float:
        """Return how many requests a request delays by its own work, per second until its prefill ends.

        `scale` is the fleet's current cost per unit of work, so that a newly learned speed also applies to
        work that was counted before.
        """
        if self._first_s is None or num_backends <= 0:
            return 0.0
        window_s = self._window_s
        fade = math.exp((self._last_s - now_s) / window_s) if now_s > self._last_s else 1.0
        seen_s = window_s * (1.0 - math.exp(-max(1.0, now_s - self._first_s) / window_s)) * num_backends
        rate = (self._arrivals * fade + 1.0) / seen_s  # the request being placed counts too
        utilisation = min(_MAX_UTILISATION, self._work * scale * fade / seen_s)
        return rate * (1.0 + self.regret) / (1.0 - utilisation)

    @property
    def mean_work(self) -> float:
        """Work per request, in prefill seconds at the configured default speed."""
        return self._work / self._arrivals if self._arrivals > 0 else 0.0

    def add_many(self, arrivals: Iterable[tuple[float, float, int, int]]) -> None:
        """Count requests in the order sent: (time, work, written bytes, regretted bytes) of each.

        Changes the averages.
        """
        last_s, window_s = self._last_s, self._window_s
        slow_window_s = window_s * _REGRET_WINDOW_FACTOR
        num_arrivals, work, written, regretted = self._arrivals, self._work, self._written, self._regretted
        for now_s, added_work, written_bytes, regretted_bytes in arrivals:
            if self._first_s is None:
                self._first_s = last_s = now_s
            if now_s > last_s:
                fade = math.exp(-(now_s - last_s) / window_s)
                slow_fade = math.exp(-(now_s - last_s) / slow_window_s)
                num_arrivals *= fade
                work *= fade
                written *= slow_fade
                regretted *= slow_fade
                last_s = now_s
            num_arrivals += 1.0
            work += added_work
            written += written_bytes
            regretted += regretted_bytes
            if written > 0:
                self.regret = min(_MAX_REGRET, _REGRET_WEIGHT * regretted / written)
        self._last_s = last_s
        self._arrivals, self._work, self._written, self._regretted = num_arrivals, work, written, regretted
