"""Health of backends: which evidence speaks for or against one. The caller feeds it observations.

There are two kinds of evidence. *Probes* are the gateway's own small requests; *outcomes* are those of real
requests. A backend stands well after `healthy_after` consecutive good probes, and badly after
`unhealthy_after` consecutive failures, so one lost packet changes nothing, and a log of flips is a log of
real changes. Whether a bad standing takes it out is another question: `standing.py` answers it for a pool.

Failures of both kinds add up, but they are cleared differently:

* A served request clears all failures: serving is the backend's job, and a busy engine answers probes late.
* A good probe clears failed probes only: an engine may answer its health path and reset every request.
* Failed requests are forgotten if no other follows within `request_failure_window_s`.
* A failed probe counts for nothing while answers flow: the backend has completed one, or delivered bytes of
  one, within the time of a probe. It counts if the connection was refused: a server that is shutting down
  finishes its streams and takes no more.

In a row is not the only way to fail. An engine that fails every fourth request never fails three in a row for
long. So the share of failures over a window is compared with that of the other backends of the pool, at
each probe and not at each request.

Outcomes that say nothing about the backend (the client's own 4xx, an overload answer, our own limits) are
*neutral*. As a success they would let a client with bad requests keep a broken backend in the fleet; as a
failure they would let it empty the fleet.

The way back. Probes bring back whom probes took out, or who was not there. A backend that requests took out
needs good probes and then a trial: it gets a few requests, the router sees to it that they are few, and the
first that fails ends the trial. A backend that keeps flapping stays out longer each time (doubling, up to a
cap), because probes of a crashing engine succeed between crashes.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from gateway.errors import UpstreamPoolFull, UpstreamRefused
from gateway.routing.standing import UNDOUBTED, Standing
from gateway.values import BackendId

MIN_FAILURES_OF_SHARE = 5
"""A share of failures needs this many: two or three may be chance in any window."""


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
    panic_threshold: float = 0.5
    """When less than this share of a model's ready backends would be left, failed probes are not believed:
    they take none of them out. With 0 only the last one is kept."""
    failure_share_margin: float = 0.1
    """A backend goes out when its share of failed requests exceeds that of the model's other backends by
    this. 1 turns it off."""
    failure_share_window_s: float = 30.0
    """Time over which those shares are taken."""
    failure_share_min_requests: int = 20
    """A backend with fewer requests than this in the window is not judged by its share."""
    trial_requests: int = 3
    """A backend that failing requests took out is ready again after so many successes in a row. Until then it
    gets new sessions only, at most three at a time, and one failure takes it out again."""
    min_down_s: float = 1.0
    """Shortest time out; doubles with each relapse."""
    max_down_s: float = 30.0
    """Longest time out."""
    relapse_window_s: float = 120.0
    """A backend that stayed up this long starts again from `min_down_s`."""

    def __post_init__(self) -> None:
        if min(self.unhealthy_after, self.healthy_after, self.trial_requests) < 1:
            raise ValueError("unhealthy_after, healthy_after and trial_requests must be at least 1")
        if not (0 <= self.panic_threshold <= 1 and 0 < self.failure_share_margin <= 1):
            raise ValueError("panic_threshold must be 0 to 1, and failure_share_margin above 0 and at most 1")
        waits = (self.probe_interval_s, self.suspect_interval_s, self.probe_timeout_s)
        if min(*waits, self.request_failure_window_s, self.failure_share_window_s) <= 0:
            raise ValueError("probe intervals, timeouts and windows must be above 0")

    @property
    def life_s(self) -> float:
        """An answer within this time proves that the backend lives, whatever a probe says."""
        return max(self.probe_interval_s, self.probe_timeout_s)


class Outcome(enum.Enum):
    """What one request or probe says about the backend's health."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"


_WORDS_OF_LOAD = re.compile(
    rb"queue|overload|capacity|too many|rate.?limit|busy|try again|no slot|throttl", re.IGNORECASE
)
_MOST_WORDS_BYTES = 2_048


def outcome_of_status(
    status: int, *, has_retry_after: bool = False, words: bytes = b"", has_queue: bool = False
) -> Outcome:
    """Judge a response status. 4xx is the client's fault; 429, and 503 for load, are no sickness.

    A 503 (or 529) is for load if it comes with `Retry-After`, if `words`, the beginning of its body, say so,
    or if requests wait in the engine's queue.
    """
    if status < 400:
        return Outcome.SUCCESS
    if status < 500:
        return Outcome.NEUTRAL
    if status == 529 or (status == 503 and (has_retry_after or has_queue)):
        return Outcome.NEUTRAL
    if status == 503 and _WORDS_OF_LOAD.search(words, 0, _MOST_WORDS_BYTES):
        return Outcome.NEUTRAL
    return Outcome.FAILURE


def is_refusal(cause: str) -> bool:
    """Whether this cause of a failure says that nobody listens there."""
    return cause == UpstreamRefused.code


def is_our_own(cause: str) -> bool:
    """Whether this cause of a failure is a limit of the gateway."""
    return cause == UpstreamPoolFull.code


@dataclass(slots=True)
class _Tally:
    """Requests of about one window: those of the running one, and what still counts of the one before."""

    num_served: int = 0
    num_failed: int = 0
    begun_s: float = 0.0
    served_before: int = 0
    failed_before: int = 0

    def turn(self, now_s: float, window_s: float) -> None:
        """Begin the next window if this one is over. Called at each probe, so at most a probe late."""
        age_s = now_s - self.begun_s
        if age_s < window_s:
            return
        is_next = age_s < 2 * window_s
        self.served_before, self.failed_before = (self.num_served, self.num_failed) if is_next else (0, 0)
        self.num_served = self.num_failed = 0
        self.begun_s = now_s

    def counts(self, now_s: float, window_s: float) -> tuple[float, float]:
        """Requests and failures; the window before counts by the part of it that is not over."""
        part = max(0.0, 1.0 - (now_s - self.begun_s) / window_s)
        num_failed = self.num_failed + part * self.failed_before
        return num_failed + self.num_served + part * self.served_before, num_failed


@dataclass(slots=True)
class _Record:
    standing: Standing = Standing.NEW
    probe_failures: int = 0  # since the last good probe or served request
    request_failures: int = 0  # since the last served request
    request_failed_s: float = 0.0  # the last time
    refusals: int = 0  # since the last good probe
    served_s: float = -math.inf  # the last time
    successes: int = 0  # consecutive good probes; on trial, served requests
    changed_at_s: float = 0.0
    down_s: float = 0.0  # current penalty
    tally: _Tally = field(default_factory=_Tally)


class HealthTable:
    """How each backend stands. One row per backend; `forget` removes it."""

    def __init__(self, settings: HealthSettings) -> None:
        self.settings = settings
        self._records: dict[BackendId, _Record] = {}

    def __repr__(self) -> str:
        num_suspect = sum(map(self.is_suspect, self._records))
        num_up = sum(record.standing is Standing.WELL for record in self._records.values())
        return f"<HealthTable {num_up} up of {len(self._records)}, {num_suspect} suspect>"

    def standing(self, backend_id: BackendId) -> Standing:
        record = self._records.get(backend_id)
        return Standing.NEW if record is None else record.standing

    def is_any_doubtful(self) -> bool:
        """Whether some backend's standing leaves open if it goes out, see `standing.spared`. O(backends)."""
        return any(record.standing not in UNDOUBTED for record in self._records.values())

    def is_suspect(self, backend_id: BackendId) -> bool:
        """Whether it stands badly or is failing, and should be probed more often."""
        record = self._records.get(backend_id)
        if record is None or record.standing not in (Standing.WELL, Standing.ON_TRIAL):
            return True
        return record.probe_failures + record.request_failures > 0

    def forget(self, backend_id: BackendId) -> None:
        self._records.pop(backend_id, None)

    # -- evidence

    def observe_probe(
        self,
        backend_id: BackendId,
        outcome: Outcome,
        now_s: float,
        *,
        is_refused: bool = False,
        is_answering: bool = False,
    ) -> bool:
        """Count one probe. Returns whether the standing has changed.

        `is_refused`: the connection was. `is_answering`: bytes of an answer have come lately.
        """
        record = self._records.setdefault(backend_id, _Record(changed_at_s=now_s))
        record.tally.turn(now_s, self.settings.failure_share_window_s)
        self._forget_old_failures(record, now_s)
        if outcome is Outcome.NEUTRAL:
            return False
        if outcome is Outcome.SUCCESS:
            record.probe_failures = record.refusals = 0
            return self._may_come_up(record, now_s)
        record.refusals += is_refused
        if is_answering or now_s - record.served_s <= self.settings.life_s:
            record.probe_failures = 0
            return self._judge(record, now_s) or (is_answering and self._acquit(record, now_s))
        if record.standing is not Standing.ON_TRIAL:
            record.successes = 0
        record.probe_failures += 1
        return self._judge(record, now_s)

    def observe_outcome(
        self, backend_id: BackendId, outcome: Outcome, now_s: float, *, is_refused: bool = False
    ) -> bool:
        """Count one request. Returns whether the standing has changed. The costs of a success matter."""
        record = self._records.get(backend_id)
        if record is None or outcome is Outcome.NEUTRAL:
            return False
        if outcome is Outcome.SUCCESS:
            record.served_s = now_s
            record.tally.num_served += 1
            if record.standing is Standing.WELL:
                record.probe_failures = record.request_failures = 0
                return False
            return self._note_served(record, now_s)
        self._forget_old_failures(record, now_s)
        record.tally.num_failed += 1
        record.request_failures += 1
        record.request_failed_s = now_s
        record.refusals += is_refused
        return self._judge(record, now_s)

    def failure_share(self, backend_id: BackendId, now_s: float) -> float | None:
        """Return the share of failures of a backend in service, None if nothing can be said by it yet."""
        record = self._records.get(backend_id)
        if record is None or record.standing is not Standing.WELL:
            return None
        settings = self.settings
        num_requests, num_failed = record.tally.counts(now_s, settings.failure_share_window_s)
        if num_requests < settings.failure_share_min_requests or num_failed < MIN_FAILURES_OF_SHARE:
            return None
        share = num_failed / num_requests
        return share if share > settings.failure_share_margin else None

    def compare_share(self, backend_id: BackendId, others: Iterable[BackendId], now_s: float) -> bool:
        """Hold its share of failures against that of the others together. Returns whether it fails often now.

        O(others), so it is for probes, and only where `failure_share` is above the margin at all.
        """
        share = self.failure_share(backend_id, now_s)
        if share is None:
            return False
        num_requests = num_failed = 0.0
        for other in others:
            record = self._records.get(other)
            if record is not None and record.standing is Standing.WELL and other != backend_id:
                requests, failed = record.tally.counts(now_s, self.settings.failure_share_window_s)
                num_requests, num_failed = num_requests + requests, num_failed + failed
        usual = num_failed / num_requests if num_requests else 0.0
        if share <= usual + self.settings.failure_share_margin:
            return False
        return self._condemn(self._records[backend_id], Standing.FAILS_OFTEN, now_s)

    # -- what follows from it

    def _forget_old_failures(self, record: _Record, now_s: float) -> None:
        if now_s - record.request_failed_s > self.settings.request_failure_window_s:
            record.request_failures = 0

    def _note_served(self, record: _Record, now_s: float) -> bool:
        """A request served by a backend that does not stand well. It may end a trial, or acquit.

        It brings back nobody whom requests took out: what comes late, from before, proves nothing.
        """
        if record.standing is not Standing.ON_TRIAL:
            return self._acquit(record, now_s)
        record.probe_failures = record.request_failures = 0
        record.successes += 1
        is_over = record.successes >= self.settings.trial_requests
        return is_over and self._come_up(record, Standing.WELL, now_s)

    def _acquit(self, record: _Record, now_s: float) -> bool:
        """Answers flow from a backend that failed its probes only: the probes were wrong."""
        if record.standing is not Standing.FAILED_PROBES:
            return False
        record.down_s = 0.0
        return self._come_up(record, Standing.WELL, now_s)

    def _may_come_up(self, record: _Record, now_s: float) -> bool:
        """Count a good probe; bring the backend up after enough of them and enough time out."""
        if record.standing in (Standing.WELL, Standing.ON_TRIAL):
            return False
        record.successes += 1
        out_long_enough = now_s - record.changed_at_s >= record.down_s
        if record.successes < self.settings.healthy_after or not out_long_enough:
            return False
        needs_trial = record.standing in (Standing.FAILS_OFTEN, Standing.FAILED_REQUESTS)
        record.tally = _Tally(begun_s=now_s)
        return self._come_up(record, Standing.ON_TRIAL if needs_trial else Standing.WELL, now_s)

    def _come_up(self, record: _Record, standing: Standing, now_s: float) -> bool:
        record.standing, record.successes, record.changed_at_s = standing, 0, now_s
        record.probe_failures = record.request_failures = 0  # of requests under way when it went down
        return True

    def _judge(self, record: _Record, now_s: float) -> bool:
        """After a failure: see how bad its standing is now."""
        limit = self.settings.unhealthy_after
        standing, num_failed = record.standing, record.request_failures
        if record.refusals >= limit:
            return self._condemn(record, Standing.REFUSED, now_s)
        if num_failed >= limit or (num_failed and standing is Standing.ON_TRIAL):
            return self._condemn(record, Standing.FAILED_REQUESTS, now_s)
        if record.probe_failures + num_failed < limit:
            return False
        # both kinds add up to take it out; once failed probes have done so, requests must do it alone
        by_both = standing is Standing.ON_TRIAL or (num_failed > 0 and standing is Standing.WELL)
        return self._condemn(record, Standing.FAILED_REQUESTS if by_both else Standing.FAILED_PROBES, now_s)

    def _condemn(self, record: _Record, standing: Standing, now_s: float) -> bool:
        """Give it this standing if that is worse than the present one; for longer after a relapse."""
        was = record.standing
        if was is Standing.NEW or standing <= was:
            return False
        record.standing = standing
        if was in (Standing.WELL, Standing.ON_TRIAL):
            settings = self.settings
            relapsed = now_s - record.changed_at_s < settings.relapse_window_s and record.down_s > 0
            record.down_s = min(record.down_s * 2, settings.max_down_s) if relapsed else settings.min_down_s
            record.changed_at_s, record.successes = now_s, 0
        return True
