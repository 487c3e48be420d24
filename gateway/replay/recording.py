"""Repeats a recording and compares every decision, bit for bit: `homing replay FILE`.

`gateway.routing.recording` describes the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gateway.errors import GatewayError
from gateway.replay.rivals.registry import ALL_POLICIES
from gateway.routing.recording import RecordedEvent
from gateway.routing.reservation import Reservation
from gateway.routing.router import Router
from gateway.values import Decision


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that differs from the recorded one."""

    line: int
    recorded: Decision | str | None
    replayed: Decision | str


def replay(lines: Iterable[bytes]) -> Iterator[Mismatch]:
    """Repeat a recording in a new router and yield every decision that differs. Raises ValueError."""
    decoder = msgspec.json.Decoder(RecordedEvent)
    router: Router | None = None
    held: dict[int, Reservation] = {}
    for number, line in enumerate(lines, start=1):
        event = decoder.decode(line)
        if event.settings is not None and event.event == "settings":
            router = Router(event.settings, policies=ALL_POLICIES)
            continue
        if router is None:
            raise ValueError(f"line {number}: a recording begins with its settings")
        if event.event == "decide":
            replayed = _decide(router, event)
            recorded = event.decision or event.error
            if replayed != recorded:
                yield Mismatch(line=number, recorded=recorded, replayed=replayed)
        else:
            _apply(router, event, held)


def _decide(router: Router, event: RecordedEvent) -> Decision | str:
    assert event.facts is not None
    try:
        return router.decide(
            event.facts,
            event.binding,
            event.now_s,
            excluded=frozenset(event.excluded),
            avoided=frozenset(event.avoided),
            by_ring=event.by_ring,
        )
    except GatewayError as error:
        return error.code


def _apply(router: Router, event: RecordedEvent, held: dict[int, Reservation]) -> None:
    """Tell the router one event that is not a question."""
    if event.settings is not None:
        router.reconfigure(event.settings)
    elif event.view is not None:
        router.observe_view(event.view, event.now_s)
    elif event.load is not None and event.backend_id is not None:
        running, waiting, usage = event.load
        router.observe_load(
            event.backend_id, num_running=running, num_waiting=waiting, kv_usage=usage, now_s=event.now_s
        )
    elif event.news is not None:
        router.observe_news(event.news, event.now_s)
    elif event.others is not None:
        router.observe_others(event.others, event.now_s)
    elif event.event in ("sent", "reserve"):
        if event.facts is None or event.decision is None:
            raise ValueError(f"an event {event.event!r} without facts or decision")
        enter = router.note_sent if event.event == "sent" else router.reserve
        held[event.number] = enter(event.facts, event.decision, event.now_s, backend_id=event.backend_id)
    elif event.event == "first_token":
        router.first_token(held[event.number], event.now_s)
    elif event.event == "ended":
        router.note_ended(held[event.number], event.now_s, event.usage, event.completed)
    elif event.event == "take":
        _take(router, event.batch, held)
    elif event.event == "release":
        router.release(held.pop(event.number), event.now_s, event.usage, event.completed)
    else:
        raise ValueError(f"unknown event {event.event!r}")


def _take(router: Router, numbers: Sequence[int], held: dict[int, Reservation]) -> None:
    """Take a recorded batch, and forget the reservations that are done."""
    router.take([held[number] for number in numbers])
    for number in numbers:
        if number in held and held[number].num_taken == 2:
            del held[number]
