"""Health of backends: which evidence flips a backend up or down. Pure; the shell feeds it observations.

Two kinds of evidence meet here. *Probes* are the gateway's own small requests, *outcomes* are what real
requests met. A backend goes down after `unhealthy_after` consecutive failures of either kind and comes up
after `healthy_after` consecutive good probes, so one lost packet changes nothing and a log of flips is a
log of changes. Outcomes that say nothing about the backend (the client's own 4xx, an overload answer) are
*neutral*: they neither count as failure nor heal a streak, because counting them as success would let a
client with bad requests hold a broken backend in the fleet, and counting them as failure would let it
empty the fleet.

A backend that keeps flapping stays out longer each time (doubling, capped): probes of a crashing engine
succeed between crashes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from gateway.values import BackendId


class HealthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a backend counts as down or up again."""

    probe_interval_s: float = 2.0
    """Time between probes of a healthy backend."""
    suspect_interval_s: float = 0.25
    """Time between probes while a backend is failing or coming back."""
    probe_timeout_s: float = 1.5
    unhealthy_after: int = 3
    """Consecutive failures (probes and requests together) that take a backend out."""
    healthy_after: int = 2
    """Consecutive good probes that bring it back."""
    min_down_s: float = 1.0
    """Shortest time out; doubles with each relapse."""
    max_down_s: float = 30.0
    relapse_window_s: float = 120.0
    """A backend that stayed up this long starts again from `min_down_s`."""

    def __post_init__(self) -> None:
        if min(self.unhealthy_after, self.healthy_after) < 1:
            raise ValueError("unhealthy_after and healthy_after must be at least 1")
        if min(self.probe_interval_s, self.suspect_interval_s, self.probe_timeout_s) <= 0:
            raise ValueError("probe intervals and timeouts must be above 0")


class Outcome(enum.Enum):
    """What one request or probe says about the backend's health."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"


def outcome_of_status(status: int, *, has_retry_after: bool = False) -> Outcome:
    """Judge a response status. 4xx is the client's; 503 or 429 with Retry-After is load, not sickness."""
    if status < 400:
        return Outcome.SUCCESS
    if status < 500 or (status == 503 and has_retry_after):
        return Outcome.NEUTRAL
    return Outcome.FAILURE


@dataclass(slots=True)
class _Record:
    is_up: bool = False
    failures: int = 0  # consecutive, probes and requests
    successes: int = 0  # consecutive good probes
    changed_at_s: float = 0.0
    down_s: float = 0.0  # current penalty


class HealthTable:
    """Up or down for each backend. One row per backend; `forget` removes it."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self._records: dict[BackendId, _Record] = {}

    def is_up(self, backend_id: BackendId) -> bool:
        record = self._records.get(backend_id)
        return record is not None and record.is_up

    def is_suspect(self, backend_id: BackendId) -> bool:
        """Down, or failing: probe it more often."""
        record = self._records.get(backend_id)
        return record is None or not record.is_up or record.failures > 0

    def forget(self, backend_id: BackendId) -> None:
        self._records.pop(backend_id, None)

    def observe_probe(self, backend_id: BackendId, outcome: Outcome, now_s: float) -> bool:
        """Take in one probe. Returns whether the backend flipped."""
        record = self._records.setdefault(backend_id, _Record(changed_at_s=now_s))
        if outcome is not Outcome.SUCCESS:
            return self._observe_failure(record, outcome, now_s)
        record.failures = 0
        if record.is_up:
            return False
        record.successes += 1
        out_long_enough = now_s - record.changed_at_s >= record.down_s
        if record.successes < self.settings.healthy_after or not out_long_enough:
            return False
        record.is_up, record.successes, record.changed_at_s = True, 0, now_s
        return True

    def observe_outcome(self, backend_id: BackendId, outcome: Outcome, now_s: float) -> bool:
        """Take in one request's outcome. A success never brings a backend up: only probes do."""
        record = self._records.get(backend_id)
        if record is None:
            return False
        if outcome is Outcome.SUCCESS:
            record.failures = 0
            return False
        return self._observe_failure(record, outcome, now_s)

    def _observe_failure(self, record: _Record, outcome: Outcome, now_s: float) -> bool:
        if outcome is Outcome.NEUTRAL:
            return False
        record.successes = 0
        record.failures += 1
        if not record.is_up or record.failures < self.settings.unhealthy_after:
            return False
        relapsed = now_s - record.changed_at_s < self.settings.relapse_window_s and record.down_s > 0
        record.down_s = (
            min(record.down_s * 2, self.settings.max_down_s) if relapsed else self.settings.min_down_s
        )
        record.is_up, record.failures, record.changed_at_s = False, 0, now_s
        return True
