"""Health under any sequence of probes and outcomes: a stateful property test of the fleet.

Three backends, two models, a clock. What must hold is said in the invariants and in `probe`; at the end all
faults are over, and every backend must come back.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.fleet.model_list import ModelCard
from gateway.fleet.registry import Fleet
from gateway.routing.health import HealthSettings, Outcome
from gateway.routing.standing import Standing
from gateway.values import Backend, BackendId, BackendState

MODELS = {"a": frozenset({"m"}), "b": frozenset({"m", "n"}), "c": frozenset({"m"})}
NAMES = st.sampled_from([BackendId(name) for name in MODELS])
PROBE_FAULTS = ("probe_timeout", "probe_500", "upstream_reset", "upstream_connect_failed", "upstream_refused")
REQUEST_FAULTS = ("status_500", "status_503", "upstream_reset", "upstream_timeout", "upstream_refused")
BY_REQUESTS = (Standing.FAILED_REQUESTS, Standing.FAILS_OFTEN, Standing.ON_TRIAL, Standing.REFUSED)


class HealthMachine(RuleBasedStateMachine):
    """The fleet, and beside it what was told of each backend."""

    @initialize(threshold=st.sampled_from([0.0, 0.5, 1.0]), ready=st.sampled_from(["abc", "abc", "ac", ""]))
    def start(self, threshold: float, ready: str) -> None:
        self.now_s = 1_000.0
        self.settings = HealthSettings(panic_threshold=threshold, failure_share_min_requests=8)
        self.fleet = Fleet(self.settings, clock=lambda: self.now_s)
        self.served_s = dict.fromkeys(MODELS, float("-inf"))
        self.refusals = dict.fromkeys(MODELS, 0)  # since the last good probe
        self.was_ready: set[str] = set()
        self.was_refused: set[str] = set()
        for name, models in MODELS.items():
            self.fleet.add(Backend(backend_id=BackendId(name), base_url="http://127.0.0.1:1"))
            self.fleet.observe_models(BackendId(name), [ModelCard(id=model) for model in models])

        for name in ready:
            self.probe_well(BackendId(name), 2)

    def state(self, name: str) -> BackendState:
        return self.fleet.view.backends[BackendId(name)].state

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(name=NAMES, times=st.integers(1, 3))
    def probe_well(self, name: BackendId, times: int) -> None:
        self.refusals[name] = 0
        for _ in range(times):
            self.probe(name, Outcome.SUCCESS, "probe", is_answering=False)

    @rule(name=NAMES, cause=st.sampled_from(PROBE_FAULTS), answers=st.booleans(), times=st.integers(1, 4))
    def probe_badly(self, name: BackendId, cause: str, answers: bool, times: int) -> None:
        for _ in range(times):
            self.refusals[name] += cause == "upstream_refused"
            self.probe(name, Outcome.FAILURE, cause, is_answering=answers)

    def probe(self, name: BackendId, outcome: Outcome, cause: str, *, is_answering: bool) -> None:
        """No probe, of this or of another, takes out a backend that completes answers."""
        before = {one: self.state(one) for one in MODELS}
        self.fleet.observe_probe(name, outcome, cause, is_answering=is_answering)
        for one, state in before.items():
            if state is not BackendState.DOWN and self.state(one) is BackendState.DOWN:
                standing = self.fleet.health.standing(BackendId(one))
                serves = self.now_s - self.served_s[one] <= self.settings.life_s
                assert standing in BY_REQUESTS if serves or (one == name and is_answering) else True

    @rule(name=NAMES, num_served=st.integers(1, 12), num_failed=st.integers(0, 6))
    def serve(self, name: BackendId, num_served: int, num_failed: int) -> None:
        for number in range(num_served):
            if number < num_failed:
                self.fleet.observe_outcome(name, Outcome.FAILURE, "status_500")
            self.fleet.observe_outcome(name, Outcome.SUCCESS)
        self.served_s[name] = self.now_s

    @rule(name=NAMES, cause=st.sampled_from(REQUEST_FAULTS), times=st.integers(1, 4))
    def fail(self, name: BackendId, cause: str, times: int) -> None:
        for _ in range(times):
            self.refusals[name] += cause == "upstream_refused"
            self.fleet.observe_outcome(name, Outcome.FAILURE, cause)

    @rule(name=NAMES, cause=st.sampled_from(["status_400", "status_429"]))
    def say_nothing(self, name: BackendId, cause: str) -> None:
        before = self.fleet.view
        self.fleet.observe_outcome(name, Outcome.NEUTRAL, cause)
        assert self.fleet.view is before

    @invariant()
    def only_refused_connections_empty_a_pool(self) -> None:
        """If no backend of a model is left, nobody listens at any of those that were ready."""
        if not hasattr(self, "fleet"):
            return
        self.was_ready |= {one for one in MODELS if self.state(one) is BackendState.READY}
        refused = {one for one in MODELS if self.fleet.health.standing(BackendId(one)) is Standing.REFUSED}
        for one in refused - self.was_refused:
            assert self.refusals[one] >= self.settings.unhealthy_after
        self.was_refused = refused
        for model in ("m", "n"):
            pool = [one for one in self.was_ready if model in MODELS[one]]
            if pool and not any(self.state(one).is_routable for one in pool):
                assert refused.issuperset(pool)

    def teardown(self) -> None:
        """Faults end: good probes, and requests that are served."""
        if not hasattr(self, "fleet"):
            return
        for _ in range(6):
            self.now_s += self.settings.max_down_s
            for name in MODELS:
                self.fleet.observe_probe(BackendId(name), Outcome.SUCCESS)
                self.fleet.observe_outcome(BackendId(name), Outcome.SUCCESS)
        assert {self.state(name) for name in MODELS} == {BackendState.READY}
        assert not self.fleet.spared


TestHealthMachine = HealthMachine.TestCase
TestHealthMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
