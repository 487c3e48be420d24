"""The fleet: one view per change, wishes of operators beside observed health, epochs that name a life."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import NotFound
from gateway.fleet.engine_metrics import EngineReport
from gateway.fleet.model_list import ModelCard
from gateway.fleet.registry import Fleet, StateChange
from gateway.routing.health import HealthSettings, Outcome
from gateway.values import Backend, BackendId, BackendState, FleetView

A, B, C = BackendId("a"), BackendId("b"), BackendId("c")


class World:
    """A fleet with a clock that tests move, and a record of what it published."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.wall_s = 5_000.0
        self.views: list[FleetView] = []
        self.changes: list[StateChange] = []
        self.fleet = Fleet(
            HealthSettings(healthy_after=1),
            clock=lambda: self.now_s,
            wall_clock=lambda: self.wall_s,
        )
        self.fleet.add_view_observer(self.views.append)
        self.fleet.add_change_observer(self.changes.append)

    def add(self, backend_id: BackendId, url: str = "http://127.0.0.1:1", **fields: Any) -> None:
        self.fleet.add(Backend(backend_id=backend_id, base_url=url, **fields))

    def bring_up(self, backend_id: BackendId) -> None:
        self.fleet.observe_probe(backend_id, Outcome.SUCCESS)

    def vanish(self, backend_id: BackendId) -> None:
        """Nobody listens there any more."""
        for _ in range(3):
            self.fleet.observe_probe(backend_id, Outcome.FAILURE, "upstream_refused")

    def fail(self, backend_id: BackendId, cause: str = "upstream_reset") -> None:
        for _ in range(3):
            self.fleet.observe_outcome(backend_id, Outcome.FAILURE, cause)

    def fail_probes(self, *backend_ids: BackendId) -> None:
        for backend_id in backend_ids * 3:
            self.fleet.observe_probe(backend_id, Outcome.FAILURE, "probe_timeout")

    def state(self, backend_id: BackendId) -> BackendState:
        return self.fleet.view.backends[backend_id].state


def test_a_backend_joins_turns_ready_and_goes_down() -> None:
    """The three states of a plain life, each flip reported once with its reason."""
    world = World()
    world.add(A)
    assert world.state(A) is BackendState.JOINING
    world.bring_up(A)
    assert world.state(A) is BackendState.READY
    world.vanish(A)
    assert world.state(A) is BackendState.DOWN
    assert [(change.before, change.after) for change in world.changes] == [
        (BackendState.JOINING, BackendState.READY),
        (BackendState.READY, BackendState.DOWN),
    ]


def test_published_views_never_change() -> None:
    """A view that a request holds shows the same fleet for ever."""
    world = World()
    world.add(A)
    held = world.fleet.view
    world.bring_up(A)
    world.add(B)
    assert held.backends[A].state is BackendState.JOINING
    assert B not in held.backends
    assert world.fleet.view.generation > held.generation


def test_a_drain_outlives_a_crash() -> None:
    """A drained backend that dies is down, and is still draining when it comes back; undrain restores it."""
    world = World()
    world.add(A)
    world.bring_up(A)
    world.fleet.drain(A, 60.0)
    assert world.state(A) is BackendState.DRAINING
    world.vanish(A)
    assert world.state(A) is BackendState.DOWN
    world.now_s += 10
    world.bring_up(A)
    assert world.state(A) is BackendState.DRAINING
    assert world.fleet.drain_left_s(A) == 50.0
    world.fleet.undrain(A)
    assert world.state(A) is BackendState.READY
    assert world.fleet.drain_left_s(A) is None


def test_the_epoch_is_the_process_start_time() -> None:
    """The same process keeps its epoch over scrapes; a new process gets its own, on every replica alike."""
    world = World()
    world.add(A)
    world.fleet.observe_report(A, EngineReport(start_time_s=1700.4))
    world.fleet.observe_report(A, EngineReport(start_time_s=1700.4))
    assert world.fleet.view.backends[A].epoch == 1700
    world.now_s = 300.0
    world.fleet.observe_report(A, EngineReport(start_time_s=1800.9))
    assert world.fleet.view.backends[A].epoch == 1800
    assert world.fleet.view.backends[A].since_s == 300.0


def test_a_clock_set_back_does_not_revive_an_old_life() -> None:
    """Epochs only grow."""
    world = World()
    world.add(A)
    world.fleet.observe_report(A, EngineReport(start_time_s=1800.0))
    world.fleet.observe_report(A, EngineReport(start_time_s=1700.0))
    assert world.fleet.view.backends[A].epoch == 1800


def test_a_counter_that_went_backwards_is_a_new_life() -> None:
    """Engines that hide their start time still show a restart."""
    world = World()
    world.add(A)
    world.fleet.observe_report(A, EngineReport(prefix_queries=500.0))
    assert world.fleet.view.backends[A].epoch == 0
    world.fleet.observe_report(A, EngineReport(prefix_queries=20.0))
    assert world.fleet.view.backends[A].epoch == 5_000


def test_a_changed_address_is_another_backend() -> None:
    """The same name at another URL starts again: its health and cache are unknown."""
    world = World()
    world.add(A, "http://127.0.0.1:1")
    world.bring_up(A)
    world.add(A, "http://127.0.0.1:2")
    assert world.state(A) is BackendState.JOINING


def test_a_changed_weight_keeps_health() -> None:
    """Configuration changes never empty the fleet."""
    world = World()
    world.add(A)
    world.bring_up(A)
    world.add(A, weight=3.0)
    assert (world.state(A), world.fleet.view.backends[A].weight) == (BackendState.READY, 3.0)


def test_removing_publishes_and_unknown_names_are_told() -> None:
    """Removal is a state change; a wrong name gets an error that lists the right ones."""
    world = World()
    world.add(A)
    world.fleet.remove(A)
    assert not world.fleet.view.backends
    assert world.changes[-1].after is BackendState.REMOVED
    world.add(B)
    with pytest.raises(NotFound, match="known: b"):
        world.fleet.drain(A, 1.0)


def test_late_evidence_about_a_removed_backend_is_ignored() -> None:
    """A request that ends after its backend left changes nothing."""
    world = World()
    world.add(A)
    world.fleet.remove(A)
    world.fleet.observe_outcome(A, Outcome.FAILURE)
    world.fleet.observe_report(A, EngineReport(start_time_s=1.0))
    world.fleet.observe_models(A, [ModelCard(id="m")])
    assert not world.fleet.view.backends


def test_a_drain_for_one_life_does_not_touch_a_later_one() -> None:
    """A replica that learns such an order late, after the restart, does not drain the new process."""
    world = World()
    world.add(A)
    world.bring_up(A)
    world.fleet.observe_report(A, EngineReport(start_time_s=200.0))
    world.fleet.drain(A, 60.0, epoch=100)
    assert world.fleet.view.backends[A].state is BackendState.READY
    world.fleet.drain(A, 60.0, epoch=200)
    assert world.fleet.view.backends[A].state is BackendState.DRAINING
    world.fleet.cordon(A)  # a later order replaces it whole
    world.fleet.observe_report(A, EngineReport(start_time_s=300.0))
    assert world.fleet.view.backends[A].state is BackendState.CORDONED


def test_many_changes_may_be_one_view() -> None:
    """A whole configuration is published once, with each flip told."""
    world = World()
    world.add(A)
    world.bring_up(A)
    num_views = len(world.views)
    with world.fleet.one_change("configured"):
        world.add(B)
        world.fleet.drain(A, 60.0)
        world.fleet.set_weight(A, 2.0)
        assert len(world.views) == num_views
    assert len(world.views) == num_views + 1
    assert set(world.fleet.view.backends) == {A, B}
    assert (world.changes[-1].after, world.changes[-1].reason) == (BackendState.DRAINING, "configured")


# -- who stays in service though its health is bad


def make_ready(*backend_ids: BackendId, **fields: Any) -> World:
    world = World()
    for backend_id in backend_ids:
        world.add(backend_id, **fields)
        world.bring_up(backend_id)
    world.now_s += 60.0  # no answer is recent
    return world


def test_the_last_backend_stays_until_nobody_listens() -> None:
    """G03, G06: neither probes nor answers take it out; refused connections do, of requests as of probes."""
    world = make_ready(A)
    world.fail_probes(A)
    world.fail(A, "status_500")
    assert world.state(A) is BackendState.READY
    assert world.fleet.spared == {A}
    world.fail(A, "upstream_connect_failed")
    assert world.state(A) is BackendState.READY
    world.fail(A, "upstream_refused")
    assert world.state(A) is BackendState.DOWN
    assert not world.fleet.spared


def test_probes_that_would_empty_a_pool_are_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    """One of three may go; with the second, probes are wrong rather than backends dead, and both serve."""
    caplog.set_level("INFO", "homing")
    world = make_ready(A, B, C)
    world.fail_probes(A)
    assert world.state(A) is BackendState.DOWN
    world.fail_probes(B)
    assert {world.state(one) for one in (A, B, C)} == {BackendState.READY}
    world.fail_probes(C)
    assert {world.state(one) for one in (A, B, C)} == {BackendState.READY}
    for one in (A, B, C):
        world.fleet.observe_outcome(one, Outcome.SUCCESS)
    assert not world.fleet.spared
    told = [record.message for record in caplog.records if record.message.startswith("health_")]
    assert told == ["health_not_believed", "health_believed_again"]


def test_a_backend_of_another_model_is_no_help() -> None:
    """The pool is the model's, and changes with the lists of models."""
    world = make_ready(A, B)
    world.fleet.observe_models(A, [ModelCard(id="x")])
    world.fleet.observe_models(B, [ModelCard(id="y")])
    world.fail(A)
    assert world.state(A) is BackendState.READY
    world.fleet.observe_models(B, [ModelCard(id="x"), ModelCard(id="y")])
    assert world.state(A) is BackendState.DOWN


def test_who_waits_for_its_turn_serves_again_when_the_others_go() -> None:
    """A backend that fails often is better than none."""
    world = make_ready(A, B)
    world.fail(A)
    assert world.state(A) is BackendState.DOWN
    world.vanish(B)
    assert (world.state(A), world.state(B)) == (BackendState.READY, BackendState.DOWN)


def test_a_share_of_failures_is_judged_at_the_probes() -> None:
    """C04: one of three fails a quarter of its requests. It goes out, and comes back by a trial."""
    world = make_ready(A, B, C)
    for one in (A, B, C):
        world.fleet.observe_probe(one, Outcome.SUCCESS)
    for number in range(40):
        for one in (A, B, C):
            fails = one == A and number % 4 == 0
            world.fleet.observe_outcome(one, Outcome.FAILURE if fails else Outcome.SUCCESS, "status_500")
    assert world.state(A) is BackendState.READY
    for one in (A, B, C):
        world.fleet.observe_probe(one, Outcome.SUCCESS)
    assert [world.state(one) for one in (A, B, C)] == [
        BackendState.DOWN,
        BackendState.READY,
        BackendState.READY,
    ]
    assert world.changes[-1].reason == "failure_share"
    world.now_s += 1.0
    world.bring_up(A)
    assert world.state(A) is BackendState.DEGRADED
    for _ in range(3):
        world.fleet.observe_outcome(A, Outcome.SUCCESS)
    assert world.state(A) is BackendState.READY


def test_a_cordoned_backend_on_trial_stays_cordoned() -> None:
    """The operator's order is older than the trial."""
    world = make_ready(A, B)
    world.fleet.cordon(A)
    world.fail(A)
    assert world.state(A) is BackendState.DOWN
    world.now_s += 1.0
    world.bring_up(A)
    assert world.state(A) is BackendState.CORDONED


def test_our_own_limit_of_connections_is_no_evidence() -> None:
    """The gateway would take out a backend for being popular."""
    world = make_ready(A, B)
    world.fail(A, "upstream_pool_full")
    assert world.state(A) is BackendState.READY


def test_a_queue_is_believed_while_the_metrics_are_fresh() -> None:
    """Waiting requests; running ones where the engine does not tell the waiting; nothing of long ago."""
    world = make_ready(A)
    assert not world.fleet.has_queue(A)
    for report, has_queue in (
        (EngineReport(num_running=8.0, num_waiting=0.0), False),
        (EngineReport(num_running=8.0, num_waiting=2.0), True),
        (EngineReport(num_running=8.0), True),
    ):
        world.fleet.observe_report(A, report)
        assert world.fleet.has_queue(A) is has_queue
    world.now_s += 10.0
    assert not world.fleet.has_queue(A)
    assert not world.fleet.has_queue(B)


def test_a_fleet_settles_with_the_first_ready_backend_or_in_time() -> None:
    """For as long as probes may take, nobody knows if there is one."""
    world = World()
    world.add(A)
    assert not world.fleet.has_settled
    world.bring_up(A)
    assert world.fleet.has_settled
    other = World()
    other.now_s += 6.0
    assert other.fleet.has_settled
