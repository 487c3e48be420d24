"""Named events of a simulated fleet: a death, a return, an addition, a rolling restart."""

from __future__ import annotations

from gateway.replay.simulator import FleetEvent

EVENT_NAMES = ("kill", "kill_and_return", "add", "rolling_restart")
_RESTART_EVERY_S = 120.0


def events_named(
    name: str, num_engines: int, at_s: float, *, every_s: float = _RESTART_EVERY_S
) -> list[FleetEvent]:
    """Return the events, the first at `at_s`. Raises ValueError for an unknown name.

    The engine that dies is the last one. A rolling restart drains an engine for half of `every_s`, then
    restarts it; the next engine follows after `every_s`.
    """
    victim = num_engines - 1
    if name == "kill":
        return [FleetEvent(at_s=at_s, kind="down", engine=victim)]
    if name == "kill_and_return":
        down = FleetEvent(at_s=at_s, kind="down", engine=victim)
        return [down, FleetEvent(at_s=at_s + 300.0, kind="up", engine=victim)]
    if name == "add":
        return [FleetEvent(at_s=at_s, kind="add")]
    if name != "rolling_restart":
        raise ValueError(f"unknown event {name!r}: one of {', '.join(EVENT_NAMES)}")
    events = []
    for engine in range(num_engines):
        start_s = at_s + engine * every_s
        events += [
            FleetEvent(at_s=start_s, kind="drain", engine=engine),
            FleetEvent(at_s=start_s + 0.5 * every_s, kind="restart", engine=engine),
            FleetEvent(at_s=start_s + 0.75 * every_s, kind="up", engine=engine),
        ]
    return events
