"""Which fault comes when, from a seed. Pure: the same seed and length give the same schedule.

Each fault of an engine has that engine for itself, for as long as it lasts and while the gateways find out
that it is over. At least `MIN_WELL` engines are left alone at any time, so that no error can be excused with
nobody being there.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final, Literal

NUM_ENGINES: Final = 6
NUM_GATEWAYS: Final = 3
MIN_WELL: Final = 3
SETTLE_S: Final = 5.0
"""How long after a fault its engine is left alone."""

EngineFault = Literal["kill", "freeze", "fail_before", "fail_in_stream", "drain", "remove"]
Kind = EngineFault | Literal["reload", "roll", "redis_freeze", "redis_empty"]

_ENGINE_FAULTS: Final[dict[EngineFault, tuple[float, tuple[float, float]]]] = {
    "kill": (4.0, (0.5, 4.0)),
    "freeze": (3.0, (1.0, 9.0)),
    "fail_before": (2.0, (1.0, 1.0)),
    "fail_in_stream": (1.0, (1.0, 1.0)),
    "drain": (3.0, (4.0, 9.0)),
    "remove": (1.5, (3.0, 7.0)),
}
"""How often each comes relative to the others, and how long it lasts."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    at_s: float
    kind: Kind
    target: int = 0
    """Number of the engine or the gateway."""
    lasts_s: float = 0.0
    through: int = 0
    """The gateway whose admin API is used to begin it; the next one is used to end it."""


def plan(seed: int, length_s: float) -> list[Fault]:
    """The schedule of `length_s` seconds, in order."""
    faults = [*_of_engines(Random(seed), length_s), *_of_gateways(Random(seed + 1), length_s)]
    return sorted([*faults, *_of_the_site(Random(seed + 2), length_s)])


def _of_engines(rng: Random, length_s: float) -> list[Fault]:
    faults: list[Fault] = []
    free_at_s = [0.0] * NUM_ENGINES
    now_s = 0.0
    kinds = list(_ENGINE_FAULTS)
    weights = [weight for weight, _ in _ENGINE_FAULTS.values()]
    while (now_s := now_s + rng.uniform(0.5, 4.0)) < length_s:
        free = [number for number, at_s in enumerate(free_at_s) if at_s <= now_s]
        if len(free) > MIN_WELL:
            (kind,), target = rng.choices(kinds, weights), rng.choice(free)
            lasts_s = rng.uniform(*_ENGINE_FAULTS[kind][1])
            free_at_s[target] = now_s + lasts_s + SETTLE_S
            faults.append(Fault(now_s, kind, target, lasts_s, rng.randrange(NUM_GATEWAYS)))
    return faults


def _of_gateways(rng: Random, length_s: float) -> list[Fault]:
    faults: list[Fault] = []
    now_s = 0.0
    while (now_s := now_s + rng.uniform(3.0, 12.0)) < length_s:
        faults.append(Fault(now_s, "reload", rng.randrange(NUM_GATEWAYS)))
    return faults


def _of_the_site(rng: Random, length_s: float) -> list[Fault]:
    """Rolling restarts and faults of Redis, not at once: an order that only one gateway has ends with it."""
    faults: list[Fault] = []
    now_s = 3.0
    while now_s < length_s:
        round_of_kinds: list[Kind] = ["roll", "redis_freeze", "redis_empty"]
        rng.shuffle(round_of_kinds)
        for kind in round_of_kinds:
            lasts_s = rng.uniform(1.0, 8.0) if kind != "roll" else 0.0
            faults.append(Fault(now_s, kind, lasts_s=lasts_s))
            now_s += 25.0 if kind == "roll" else lasts_s + 6.0
    return [fault for fault in faults if fault.at_s < length_s]
