"""The simulator: conservation, determinism, fleet events, recordings and the command."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.replay import cli, grid, workloads
from gateway.replay.engines import EngineSpeed
from gateway.replay.events import EVENT_NAMES, events_named
from gateway.replay.measures import measure, percentile
from gateway.replay.readers import read_trace
from gateway.replay.simulator import FleetEvent, Replicas, SimulationPlan, simulate
from gateway.replay.trace import Trace, unbounded_hits
from gateway.routing.settings import POLICY_NAMES, RoutingSettings

DATA = Path(__file__).parent / "data" / "chat_synth_300.jsonl"
SPEED = EngineSpeed(prefill_s_per_token=1 / 2000, cache_tokens=200_000)


@pytest.fixture(scope="module")
def chat() -> Trace:
    return read_trace(DATA)


@pytest.fixture(scope="module")
def small_chat() -> Trace:
    return workloads.chat(60, 120.0, seed=3)


def plan(policy: str = "homing", **changes: object) -> SimulationPlan:
    base = SimulationPlan(num_engines=4, speed=SPEED, routing=RoutingSettings(policy=policy))
    return replace(base, **changes)  # type: ignore[arg-type] # loose test values


def test_the_committed_trace_has_its_published_shape(chat: Trace) -> None:
    """300 sessions, 1,555 requests, 95.9 % of prompt tokens reusable by an unbounded cache."""
    assert (len(chat.turns), chat.num_sessions, chat.is_closed) == (1555, 300, True)
    assert sum(unbounded_hits(chat)) / sum(t.prompt_tokens for t in chat.turns) == pytest.approx(
        0.9588, abs=5e-4
    )


def test_one_large_engine_reaches_the_bound(small_chat: Trace) -> None:
    """One engine with room for everything, never busy, finds all that an unbounded cache would have."""
    fast = EngineSpeed(prefill_s_per_token=1e-9, prefill_fixed_s=0.0, cache_tokens=10**9)
    bound = unbounded_hits(small_chat)
    result = measure(simulate(small_chat, plan(num_engines=1, speed=fast)), bound)
    assert result.hit_of_bound == pytest.approx(1.0, abs=0.01)
    assert result.moved == 0.0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_serves_every_request_through_fleet_events(policy: str, small_chat: Trace) -> None:
    """Deaths, a return, an addition and drains lose no request, and no router keeps a reservation."""
    events = [
        FleetEvent(at_s=20.0, kind="down", engine=1),
        FleetEvent(at_s=35.0, kind="add"),
        FleetEvent(at_s=50.0, kind="up", engine=1),
        FleetEvent(at_s=60.0, kind="drain", engine=2),
        FleetEvent(at_s=75.0, kind="restart", engine=2),
        FleetEvent(at_s=80.0, kind="up", engine=2),
    ]
    result = simulate(small_chat, plan(policy, events=events))
    assert not any(math.isnan(outcome.ttft_s) for outcome in result.outcomes)
    assert {outcome.engine for outcome in result.outcomes} == {0, 1, 2, 3, 4}


def test_a_run_is_a_function_of_its_inputs(small_chat: Trace) -> None:
    """The same trace and plan give the same outcome of every request, to the bit."""
    first, second = simulate(small_chat, plan()), simulate(small_chat, plan())
    assert first.outcomes == second.outcomes


def test_homing_beats_round_robin_and_reaches_the_bound_on_chat(chat: Trace) -> None:
    """On chats that fit the caches: at least 99 % of the bound, at most 2 % of turns moved."""
    bound = unbounded_hits(chat)
    homing = measure(simulate(chat, plan(warm_up_s=60.0)), bound)
    naive = measure(simulate(chat, plan("round_robin", warm_up_s=60.0)), bound)
    assert homing.hit_of_bound >= 0.99
    assert homing.moved <= 0.02
    assert homing.ttft_mean_s < 0.5 * naive.ttft_mean_s


def test_a_dead_backend_moves_only_its_own_sessions_and_none_return(small_chat: Trace) -> None:
    """With load out of the way, every move after a death starts at the dead engine, once."""
    fast = EngineSpeed(prefill_s_per_token=1e-6, cache_tokens=10**7)
    events = events_named("kill_and_return", 4, 60.0)
    result = simulate(small_chat, plan(speed=fast, events=events))
    moved: dict[int, int] = {}
    for index, turn in enumerate(small_chat.turns):
        before = result.outcomes[turn.follows].engine if turn.follows >= 0 else -1
        if before >= 0 and before != result.outcomes[index].engine:
            assert before == 3
            moved[turn.session] = moved.get(turn.session, 0) + 1
    assert moved
    assert set(moved.values()) == {1}


@pytest.mark.parametrize("count", [2, 4])
def test_replicas_with_one_store_route_like_one_gateway(count: int, chat: Trace) -> None:
    """Two and four gateways behind round robin that share bindings keep 95 % of one gateway's hits."""
    bound = unbounded_hits(chat)
    alone = measure(simulate(chat, plan(warm_up_s=60.0)), bound)
    replicas = Replicas(count=count, exchange_s=1.0)
    several = measure(simulate(chat, plan(warm_up_s=60.0, replicas=replicas)), bound)
    assert several.hit >= 0.95 * alone.hit


def test_keyless_conversations_are_found_by_their_prefix(chat: Trace) -> None:
    """Without any session id the prefix tree still brings most turns back: 95 % of the bound."""
    bound = unbounded_hits(chat)
    result = measure(simulate(chat, plan(warm_up_s=60.0, uses_sessions=False)), bound)
    assert result.hit_of_bound >= 0.95


def test_percentiles_are_nearest_rank() -> None:
    """The nearest-rank rule on small samples, and nothing on none."""
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 4.0]
    assert math.isnan(percentile([], 0.5))


@pytest.mark.parametrize("name", EVENT_NAMES)
def test_named_events_come_in_order(name: str) -> None:
    """Every named event begins at its time and touches engines that exist."""
    events = events_named(name, 4, 100.0)
    assert events[0].at_s == 100.0
    assert all(0 <= event.engine < 4 for event in events)


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(list(arguments)))


def test_command_prints_a_table_and_writes_json_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`homing simulate --trace FILE` answers with a row per policy, a JSON file and a picture."""
    numbers, picture = tmp_path / "out.json", tmp_path / "out.png"
    status = run_command(
        "--trace", str(DATA), "--backends", "3", "--policy", "homing,round_robin", "--load", "0.8",
        "--cache", "100000", "--json", str(numbers), "--plot", str(picture), "--event", "kill",
    )  # fmt: skip
    assert status == 0
    assert {row["policy"] for row in json.loads(numbers.read_text())} == {"homing", "round_robin"}
    assert "round_robin" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trace", "/nowhere.jsonl"],
        ["--trace", str(DATA), "--policy", "magic"],
        ["--trace", str(DATA), "--cache", "vast"],
        ["--trace", str(DATA), "--load", "much"],
    ],
)
def test_command_says_what_is_wrong(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Bad options end with status 2 and one line, never a traceback."""
    assert run_command(*arguments) == 2
    assert capsys.readouterr().err.startswith("homing simulate: ")


def test_grid_reports_regret_against_the_best(chat: Trace) -> None:
    """Regret is 1 for the best policy of a cell; missing traces are named, not invented."""
    bound = unbounded_hits(chat)
    cell = grid.Cell(scenario="chat", num_engines=4, cache="medium", load="rr90")
    rows = [measure(simulate(chat, plan(name)), bound) for name in ("homing", "round_robin")]
    result = grid.CellResult(cell=cell, prefill_tokens_per_s=2000.0, measures=rows)
    table = grid.regrets([result])
    assert min(values[0] for values in table.values()) == 1.0
    text = grid.report([result], [grid.standard_cells()[0]])
    assert "| round_robin |" in text
    assert "Not run" in text
    assert grid.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
