"""Health of backends: which evidence takes a backend out or brings it back. The caller feeds it observations.

There are two kinds of evidence. *Probes* are the gateway's own small requests; *outcomes* are those of real
requests. A backend goes down after `unhealthy_after` consecutive failures and comes up after `healthy_after`
consecutive good probes, so one lost packet changes nothing, and a log of flips is a log of real changes.

Failures of both kinds add up, but they are cleared differently:

* A served request clears all failures: serving is the backend's job, and a busy engine answers probes late.
* A good probe clears failed probes only: an engine may answer its health path and reset every request.
* Failed requests are forgotten if no other follows within `request_failure_window_s`.

Outcomes that say nothing about the backend (the client's own 4xx, an overload answer) are *neutral*. As a
success they would let a client with bad requests keep a broken backend in the fleet; as a failure they would
let it empty the fleet.

A backend that keeps flapping stays out longer each time (doubling, up to a cap), because probes of a crashing
engine succeed between crashes.
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
    """Longest wait for the answer to a probe."""
    unhealthy_after: int = 3
    """Consecutive failures (probes and requests together) that take a backend out."""
    request_failure_window_s: float = 30.0
    """Requests that fail further apart than this do not add up."""
    healthy_after: int = 2
    """Consecutive good probes that bring it back."""
    min_down_s: float = 1.0
    """Shortest time out; doubles with each relapse."""
    max_down_s: float = 30.0
    """Longest time out."""
    relapse_window_s: float = 120.0
    """A backend that stayed up this long starts again from `min_down_s`."""

    def __post_init__(self) -> None:
        if min(self.unhealthy_after, self.healthy_after) < 1:
            raise ValueError("unhealthy_after and healthy_after must be at least 1")
        waits = (self.probe_interval_s, self.suspect_interval_s, self.probe_timeout_s)
        if min(*waits, self.request_failure_window_s) <= 0:
            raise ValueError("probe intervals, timeouts and request_failure_window_s must be above 0")


class Outcome(enum.Enum):
    """What one request or probe says about the backend's health."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"


def outcome_of_status(status: int, *, has_retry_after: bool = False) -> Outcome:
    """Judge a response status. 4xx is the client's fault; 503 with Retry-After is load, not sickness."""
    if status < 400:
        return Outcome.SUCCESS
    if status < 500 or (status == 503 and has_retry_after):
        return Outcome.NEUTRAL
    return Outcome.FAILURE


@dataclass(slots=True)
class _Record:
    is_up: bool = False
    probe_failures: int = 0  # since the last good probe or served request
    request_failures: int = 0  # since the last served request
    request_failed_s: float = 0.0  # the last time
    successes: int = 0  # consecutive good probes
    changed_at_s: float = 0.0
    down_s: float = 0.0  # current penalty


class HealthTable:
    """Up or down for each backend. One row per backend; `forget` removes it."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self._records: dict[BackendId, _Record] = {}

    def __repr__(self) -> str:
        num_suspect = sum(map(self.is_suspect, self._records))
        num_up = sum(record.is_up for record in self._records.values())
        return f"<HealthTable {num_up} up of {len(self._records)}, {num_suspect} suspect>"

    def is_up(self, backend_id: BackendId) -> bool:
        record = self._records.get(backend_id)
        return record is not None and record.is_up

    def is_suspect(self, backend_id: BackendId) -> bool:
        """Whether it is down or failing, and should be probed more often."""
        record = self._records.get(backend_id)
        return record is None or not record.is_up or record.probe_failures + record.request_failures > 0

    def forget(self, backend_id: BackendId) -> None:
        self._records.pop(backend_id, None)

    def observe_probe(self, backend_id: BackendId, outcome: Outcome, now_s: float) -> bool:
        """Count one probe. Returns whether the backend flipped."""
        record = self._records.setdefault(backend_id, _Record(changed_at_s=now_s))
        self._forget_old_failures(record, now_s)
        if outcome is Outcome.NEUTRAL:
            return False
        if outcome is Outcome.FAILURE:
            record.successes = 0
            record.probe_failures += 1
            return self._may_go_down(record, now_s)
        record.probe_failures = 0
        return self._may_come_up(record, now_s)

    def observe_outcome(self, backend_id: BackendId, outcome: Outcome, now_s: float) -> bool:
        """Count one request. Returns whether the backend flipped. Only probes bring a backend up."""
        record = self._records.get(backend_id)
        if record is None or outcome is Outcome.NEUTRAL:
            return False
        if outcome is Outcome.SUCCESS:
            record.probe_failures = record.request_failures = 0
            return False
        self._forget_old_failures(record, now_s)
        record.successes = 0
        record.request_failures += 1
        record.request_failed_s = now_s
        return self._may_go_down(record, now_s)

    def _forget_old_failures(self, record: _Record, now_s: float) -> None:
        if now_s - record.request_failed_s > self.settings.request_failure_window_s:
            record.request_failures = 0

    def _may_come_up(self, record: _Record, now_s: float) -> bool:
        """Count a good probe; bring the backend up after enough of them and enough time out."""
        if record.is_up:
            return False
        record.successes += 1
        out_long_enough = now_s - record.changed_at_s >= record.down_s
        if record.successes < self.settings.healthy_after or not out_long_enough:
            return False
        record.is_up, record.successes, record.changed_at_s = True, 0, now_s
        record.request_failures = 0  # from requests that were under way when it went down
        return True

    def _may_go_down(self, record: _Record, now_s: float) -> bool:
        """Take the backend out if it has failed enough; after a relapse for longer than last time."""
        num_failures = record.probe_failures + record.request_failures
        if not record.is_up or num_failures < self.settings.unhealthy_after:
            return False
        relapsed = now_s - record.changed_at_s < self.settings.relapse_window_s and record.down_s > 0
        record.down_s = (
            min(record.down_s * 2, self.settings.max_down_s) if relapsed else self.settings.min_down_s
        )
        record.is_up, record.changed_at_s = False, now_s
        record.probe_failures = record.request_failures = 0
        return True
