"""Recorded decisions replay bit for bit, and a recording made by an earlier version still does.

The golden file changes only on purpose: with a change of the placement rules. Remake it with
`python tests/replay/test_recording.py` and say in the commit why the decisions differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from routing.routing_worlds import backend, bind, fleet, names, request

from gateway.errors import NoBackend
from gateway.replay.recording import replay
from gateway.routing.recording import RecordedEvent, RecordingRouter
from gateway.routing.settings import RoutingSettings
from gateway.values import BackendId, BackendState, Binding, Usage

GOLDEN = Path(__file__).parents[1] / "golden" / "decisions.jsonl"


def play() -> list[bytes]:
    """Drive a recorder through placements, hits, spills, a restart, a drain, a death and fail-over."""
    lines: list[bytes] = []
    settings = RoutingSettings(prefill_tokens_per_s=2000.0, kv_capacity_tokens=20_000)
    recorder = RecordingRouter(settings, lines.append)
    rows = {name: backend(name) for name in names(4)}
    recorder.observe_view(fleet(*rows.values()), 0.0)
    bindings: dict[str, Binding] = {}
    for step in range(120):
        now_s = step * 0.25
        if step == 40:
            rows["b1"] = backend("b1", epoch=2, since_s=now_s)
        if step == 60:
            rows["b2"] = backend("b2", state=BackendState.DRAINING, since_s=now_s)
        if step == 80:
            rows["b0"] = backend("b0", state=BackendState.DOWN, since_s=now_s)
        if step in (40, 60, 80):
            recorder.observe_view(fleet(*rows.values(), generation=step), now_s)
        if step % 10 == 0:
            load = {"num_running": step % 7, "num_waiting": step % 5}
            recorder.observe_load(BackendId("b3"), kv_usage=0.25, now_s=now_s, **load)
        session = None if step % 9 == 0 else f"s{step % 11}"
        texts = tuple(f"{session} {number}" for number in range(step // 11 * 2 + 1))
        facts = request(session, prompt=f"system {step % 3}", texts=texts, size=3000 if step % 4 else 200)
        decision = recorder.decide(facts, bindings.get(session or ""), now_s)
        if step % 13 == 0:
            decision = recorder.decide(facts, None, now_s, excluded=frozenset({decision.backend_id}))
        held = recorder.reserve(facts, decision, now_s)
        if session is not None:
            bindings[session] = bind(decision, epoch=rows[decision.backend_id].epoch)
        if step % 6:
            recorder.first_token(held, now_s + 0.05)
        tokens = facts.num_prompt_bytes // 4
        usage = Usage(prompt_tokens=tokens, completion_tokens=50, cached_tokens=tokens // 2)
        recorder.release(held, now_s + 0.2, usage if step % 5 else None, completed=step % 8 != 0)
    with pytest.raises(NoBackend):
        recorder.decide(request("s"), None, 99.0, excluded=frozenset(BackendId(name) for name in names(4)))
    return lines


def test_changed_settings_are_part_of_a_recording() -> None:
    """A reload in the middle decides differently from there on, and replays the same."""
    lines: list[bytes] = []
    recorder = RecordingRouter(RoutingSettings(stay_margin_s=0.0), lines.append)
    recorder.observe_view(fleet(*(backend(name) for name in names(3))), 0.0)
    held = [recorder.decide(request("s0"), None, 0.0)]
    for step in range(20):
        recorder.reserve(request(f"s{step}", size=9000), held[0], 0.1)
    settings = RoutingSettings(stay_margin_s=1e6)
    moved = recorder.decide(request("s0"), bind(held[0]), 0.2)
    recorder.reconfigure(settings)
    stayed = recorder.decide(request("s0"), bind(held[0]), 0.2)
    assert moved.backend_id != stayed.backend_id == held[0].backend_id
    assert list(replay(lines)) == []


def test_a_recording_replays_bit_for_bit() -> None:
    """Every decision of a long mixed run comes out equal, with all prices, from a new router."""
    lines = play()
    entries = [msgspec.json.decode(line, type=RecordedEvent) for line in lines]
    decisions = [entry.decision for entry in entries if entry.decision and entry.event == "decide"]
    assert {decision.affinity.value for decision in decisions} >= {
        "new",
        "hit",
        "moved",
        "failover",
        "unpinned",
    }
    assert list(replay(lines)) == []


def test_golden_decisions_still_come_out() -> None:
    """The current router repeats every recorded decision."""
    mismatches = list(replay(GOLDEN.read_bytes().splitlines()))
    assert mismatches == [], f"{len(mismatches)} decisions differ, the first on line {mismatches[0].line}"


def test_a_changed_answer_is_reported_with_its_line() -> None:
    """A recording whose decision was tampered with names the line and both answers."""
    lines = play()
    index = next(n for n, line in enumerate(lines) if b'"event":"decide"' in line)
    entry = msgspec.json.decode(lines[index], type=RecordedEvent)
    assert entry.decision is not None
    other = msgspec.structs.replace(entry, decision=None, error="no_backend_available")
    found = list(replay([*lines[:index], msgspec.json.encode(other), *lines[index + 1 :]]))
    assert [(mismatch.line, mismatch.recorded) for mismatch in found] == [(index + 1, "no_backend_available")]


def test_a_recording_must_begin_with_its_settings() -> None:
    """A cut recording is refused, not replayed with defaults."""
    with pytest.raises(ValueError, match="settings"):
        list(replay(play()[1:]))


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_bytes(b"\n".join(play()) + b"\n")
