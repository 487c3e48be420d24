"""`make soak`: three gateways, Redis and six engines as processes, agents as clients, and everything fails.

HOMING_CHAOS_S is the length in seconds (900), HOMING_CHAOS_SEED the schedule's seed. First and last it is
calm, for a tenth of the time each. Between, engines are killed, frozen, drained, removed and made to answer
with errors; gateways are reloaded and restarted one after the other; Redis is frozen, and restarted empty.

Held to: every request ends in a whole answer of its own or in a clear error; no error before content that
another healthy engine could have spared the client; clients and gateways count the same; orders hold on all
gateways; and at the end nothing is left over.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import time
from pathlib import Path

import pytest
from fakes.chaos_agents import Agents
from fakes.chaos_fleet import ChaosFleet, chaos_fleet
from fakes.chaos_plan import plan
from fakes.chaos_verdict import Verdict, faults_in_logs

DURATION_S = float(os.environ.get("HOMING_CHAOS_S", "900"))
SEED = int(os.environ.get("HOMING_CHAOS_SEED", "1"))
NUM_AGENTS = int(os.environ.get("HOMING_CHAOS_AGENTS", "40"))
CALM_S = max(8.0, DURATION_S / 10)
HEAL_LIMIT_S = 60.0
LONGEST_HANG_S = 45.0
"""Three attempts, each at most a first byte's limit and a gap's, and what a busy machine adds."""
LEAST_AT_HOME = 0.9
"""In calm times. The policy may move a session whose home has a queue, and back after the storm."""
GAUGES = ("homing_requests_in_flight", "homing_queue_depth", "homing_backend_in_flight")


async def storm(fleet: ChaosFleet, length_s: float) -> None:
    """The schedule. Returns when every fault is over, but for the last drains, which stand."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.TaskGroup() as faults:
        for fault in plan(SEED, length_s):
            await asyncio.sleep(began_s + fault.at_s - loop.time())
            faults.create_task(fleet.apply(fault, ends_by_s=began_s + length_s))


async def heal(fleet: ChaosFleet) -> None:
    """Orders hold as given, through all that came after; taken back, every engine is ready everywhere."""
    await fleet.until_as_ordered(limit_s=HEAL_LIMIT_S)
    for number, state in enumerate(list(fleet.ordered.values())):
        if state != "ready":
            await fleet.take_back(number, through=number)
    await fleet.until_as_ordered(limit_s=HEAL_LIMIT_S)


async def left_over(fleet: ChaosFleet) -> list[str]:
    """Gauges that are not back at zero, within a moment."""
    found: list[str] = []
    for _ in range(50):
        found = [
            f"g{gateway.number}: {name} {labels}: {value}"
            for gateway in fleet.gateways
            for name in GAUGES
            for labels, value in (await fleet.metrics(gateway, name)).items()
            if value
        ]
        if not found:
            break
        await asyncio.sleep(0.2)
    return found


async def miscounts(fleet: ChaosFleet, verdict: Verdict) -> list[str]:
    """Where a gateway's metrics differ from its request lines, which agree with the clients."""
    found = []
    for gateway in fleet.gateways:
        counted: collections.Counter[str] = collections.Counter()
        for labels, value in (await fleet.metrics(gateway, "homing_requests_total")).items():
            counted[dict(labels)["outcome"]] += int(value)
        if +counted != (lines := verdict.counted(gateway.number)):
            found.append(f"g{gateway.number}: metrics {dict(counted)}, lines {dict(lines)}")
    return found


@pytest.mark.redis
@pytest.mark.soak
@pytest.mark.timeout(DURATION_S + 300)
async def test_chaos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is lost, answered by another's answer or failed without need; nothing is left over."""
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(root), str(root / "cuda"))))
    async with chaos_fleet(tmp_path) as fleet:
        agents, marks_s = Agents(fleet), [time.time()]
        async with asyncio.TaskGroup() as players:
            for number in range(NUM_AGENTS):
                players.create_task(agents.play(SEED * 1000 + number))
            try:
                await asyncio.sleep(CALM_S)
                marks_s.append(time.time())
                await storm(fleet, DURATION_S - 2 * CALM_S)
                await heal(fleet)
                marks_s.append(time.time())
                await asyncio.sleep(CALM_S)
            finally:
                agents.is_over = True
        marks_s.append(time.time())
        gauges = await left_over(fleet)
        verdict = Verdict(fleet, agents.attempts)
        found = {
            "bad ends": verdict.bad_ends(),
            "errors without need": verdict.needless_errors(),
            "clients and logs differ": verdict.mismatches(),
            "metrics and logs differ": await miscounts(fleet, verdict),
            "not as ordered": fleet.violations,
            "gauges": gauges,
            "logs": faults_in_logs(fleet),
        }
    at_home = [verdict.at_home(*span) for span in itertools.pairwise(marks_s)]
    with capsys.disabled():
        print(f"\n-- chaos: seed {SEED}, {DURATION_S:.0f} s, logs in {tmp_path}")
        print("\n".join(verdict.table()))
        print("turns at home       before {:.3f}, during {:.3f}, after {:.3f}".format(*at_home))
        for what, cases in found.items():
            for case in cases[:20]:
                print(f"{what} ({len(cases)}): {case}")
    assert {what: len(cases) for what, cases in found.items() if cases} == {}
    assert max(one.took_s for one in agents.attempts) < LONGEST_HANG_S
    assert min(at_home[0], at_home[2]) >= LEAST_AT_HOME
