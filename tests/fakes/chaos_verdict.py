"""What the chaos run shows: clients' words against the gateways' logs, and which errors have an excuse."""

from __future__ import annotations

import collections
import json
from dataclasses import dataclass
from typing import Any

from fakes.chaos_agents import (
    ABORTED,
    COMPLETE,
    EVENT_ERROR,
    HTTP_ERROR,
    LATE,
    REFUSED,
    Attempt,
)
from fakes.chaos_fleet import MAX_ATTEMPTS, ChaosFleet, Gateway

FINDS_OUT_S = 10.0
"""An engine counts as healthy if it had no trouble for so long: by then every gateway must use it again."""
CLOCK_SLACK_S = 0.25
"""How far apart two processes may see the same moment."""
_FAILED = frozenset({"refused", "no_answer", "back_pressure", "failed_before_content", "not_sent"})
_OUTCOMES = {
    COMPLETE: frozenset({"complete"}),
    HTTP_ERROR: _FAILED,
    EVENT_ERROR: _FAILED | {"failed_in_stream"},
    LATE: frozenset({"failed_in_stream"}),  # the engine broke between [DONE] and the end of the body
    ABORTED: frozenset({"aborted_by_client"}),
}
"""What the gateway may call each end."""

Line = dict[str, Any]


@dataclass(slots=True)
class Life:
    """One life of a gateway's process: its request lines."""

    gateway: int
    lines: list[Line]


def lives(gateway: Gateway) -> list[Life]:
    """The gateway's log, cut where it was started."""
    found: list[Life] = []
    for entry in gateway.log():
        if entry.get("event") == "gateway_started":
            found.append(Life(gateway.number, []))
        elif entry.get("event") == "request" and found:
            found[-1].lines.append(entry)
    return found


def faults_in_logs(fleet: ChaosFleet) -> list[str]:
    """Tracebacks, lines that are no JSON, and errors that nobody foresaw."""
    found = []
    for gateway in fleet.gateways:
        for entry in gateway.log():
            text = json.dumps(entry)
            if "Traceback" in text or "unforeseen" in text or entry.get("event") == "not_json":
                found.append(f"g{gateway.number}: {text[:2000]}")
    return found


class Fullness:
    """Which engines were full, by their own words."""

    def __init__(self, fleet: ChaosFleet) -> None:
        self._refusals: dict[str, list[float]] = {}
        for engine in fleet.engines:
            lines = engine.log_path.read_text(errors="replace").splitlines()
            told = [json.loads(line) for line in lines if line.startswith('{"wall_s"') and line.endswith("}")]
            self._refusals[engine.name] = [one["wall_s"] for one in told if one["what"] == "full"]

    def of(self, from_s: float, to_s: float) -> set[str]:
        """Those that refused something in that time. Wall seconds."""
        return {
            name
            for name, refusals in self._refusals.items()
            if any(from_s <= wall_s <= to_s for wall_s in refusals)
        }


class Verdict:
    """Everything the clients saw, judged."""

    def __init__(self, fleet: ChaosFleet, attempts: list[Attempt]) -> None:
        self._fleet, self.attempts = fleet, attempts
        self.lives = [life for gateway in fleet.gateways for life in lives(gateway)]
        self._lines: dict[str, list[Line]] = collections.defaultdict(list)
        for life in self.lives:
            for line in life.lines:
                self._lines[line["request_id"]].append(line | {"gateway": life.gateway})
        self._fullness = Fullness(fleet)
        self.excused: collections.Counter[str] = collections.Counter()

    def bad_ends(self) -> list[str]:
        """Attempts that ended neither in a complete answer nor in a clear error."""
        return [self._told(one) for one in self.attempts if not self._is_clear(one)]

    def _is_clear(self, attempt: Attempt) -> bool:
        if attempt.end == REFUSED:  # nobody but a gateway that restarts may do that
            return self._fleet.was_in(
                "roll", attempt.gateway, attempt.began_s - CLOCK_SLACK_S, attempt.ended_s + CLOCK_SLACK_S
            )
        return attempt.end in _OUTCOMES

    def needless_errors(self) -> list[str]:
        """Errors before content for which there is no excuse. Fills `excused`."""
        found = []
        for attempt in self.attempts:
            if attempt.end in (HTTP_ERROR, EVENT_ERROR) and not attempt.num_content:
                excuse = self._excuse(attempt)
                if excuse is None:
                    found.append(self._told(attempt))
                else:
                    self.excused[excuse] += 1
        return found

    def _excuse(self, attempt: Attempt) -> str | None:
        lines = self._lines[attempt.request_id]
        line = lines[0] if lines else {}
        if '"shutting_down"' in attempt.detail:
            # The gateway is leaving and says so, with Retry-After: clients go to another gateway.
            if self._fleet.was_in("roll", attempt.gateway, attempt.began_s, attempt.ended_s):
                return "the gateway is leaving"
            return None
        if line.get("attempts", 0) >= MAX_ATTEMPTS:
            # Each attempt was on another engine: no more than so many are troubled with one request.
            return f"{MAX_ATTEMPTS} engines failed it"
        if attempt.status == 500 and "EngineCore" in attempt.detail:
            # A plain 500 may be about the request, so it is not among the default `retry_statuses`.
            return "an engine's own 500"
        well = self._fleet.well_engines(attempt.began_s - FINDS_OUT_S, attempt.ended_s)
        others = well - {line.get("backend", "")}
        if not others:
            return "no other engine was healthy"
        if others <= self._fullness.of(attempt.began_s - 1.0, attempt.ended_s + 1.0):
            return "all other healthy engines were full"
        return None

    def mismatches(self) -> list[str]:
        """Where the gateways' logs say something else than the clients, request by request."""
        found = []
        for attempt in self.attempts:
            lines = self._lines[attempt.request_id]
            if not self._agrees(attempt, lines):
                found.append(f"{self._told(attempt)} {len(lines)} lines")
        known = {attempt.request_id for attempt in self.attempts}
        found += [f"nobody asked: {lines[0]}" for name, lines in self._lines.items() if name not in known]
        return found

    def _agrees(self, attempt: Attempt, lines: list[Line]) -> bool:
        if attempt.end == REFUSED:
            return not lines
        if not lines:  # it left before its request had been sent
            return attempt.end == ABORTED
        if len(lines) > 1 or lines[0]["gateway"] != attempt.gateway:
            return False
        outcome, status = lines[0]["outcome"], lines[0]["status"]
        if attempt.end == ABORTED:  # the answer may have been complete already on its way
            return outcome == "aborted_by_client" or lines[0]["time"] <= attempt.ended_s + CLOCK_SLACK_S
        return outcome in _OUTCOMES.get(attempt.end, ()) and status == attempt.status

    def counted(self, gateway: int) -> collections.Counter[str]:
        """Outcomes of the last life of a gateway, by its request lines."""
        last = [life for life in self.lives if life.gateway == gateway][-1]
        return collections.Counter(line["outcome"] for line in last.lines)

    def at_home(self, from_s: float, to_s: float) -> float:
        """The share of turns that began in that time and were answered where the one before was."""
        homes: dict[str, str] = {}
        stayed = num_turns = 0
        for attempt in self.attempts:  # in the order in which they ended
            if attempt.end != COMPLETE:
                continue
            if attempt.session in homes and from_s <= attempt.began_s < to_s:
                num_turns += 1
                stayed += homes[attempt.session] == attempt.backend
            homes[attempt.session] = attempt.backend
        return stayed / num_turns if num_turns else 1.0

    def table(self) -> list[str]:
        attempts = self.attempts
        ends = collections.Counter(one.end for one in attempts)
        outcomes = collections.Counter(line["outcome"] for life in self.lives for line in life.lines)
        num_moved = sum(one.affinity == "failover" and one.end == COMPLETE for one in attempts)
        longest = max(attempts, key=lambda one: one.took_s)
        return [
            f"requests            {len(attempts)} in {len({one.session for one in attempts})} sessions",
            f"clients saw         {_listed(ends)}",
            f"gateways counted    {_listed(outcomes)}",
            f"faults              {_listed(collections.Counter(span.kind for span in self._fleet.spans))}",
            f"complete after fail-over  {num_moved}",
            f"longest             {longest.took_s:.1f} s ({longest.end}, {longest.request_id})",
            f"errors before content, excused  {_listed(self.excused) or 'none'}",
        ]

    def _told(self, attempt: Attempt) -> str:
        keys = ("outcome", "status", "attempts", "backend", "error", "reason", "duration_ms", "gateway")
        lines = [{key: line.get(key) for key in keys} for line in self._lines[attempt.request_id]]
        troubles = [
            f"{span.kind}({span.target}) "
            f"{span.began_s - attempt.began_s:+.1f}..{span.ended_s - attempt.began_s:+.1f}"
            for span in self._fleet.spans
            if span.overlaps(attempt.began_s - FINDS_OUT_S, attempt.ended_s)
        ]
        return f"{attempt} took {attempt.took_s:.2f} s; log: {lines}; around: {', '.join(troubles)}"


def _listed(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.most_common())
