"""The home test: the same decision as the whole way, and at a cost that does not grow."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

from hypothesis import given, settings
from routing.random_worlds import SETTINGS, STEPS, Step, World
from routing.routing_worlds import bind, ready_router, request

from gateway.errors import GatewayError
from gateway.routing.router import Router
from gateway.routing.settings import RoutingSettings
from gateway.values import Affinity, BackendId, Binding, Decision, RequestFacts


class ComparingWorld(World):
    """Decides each request both ways."""

    def decide(
        self,
        facts: RequestFacts,
        binding: Binding | None,
        excluded: frozenset[BackendId],
        avoided: frozenset[BackendId],
        by_ring: bool,
    ) -> Decision:
        def answer(decide: Callable[[], Decision]) -> Decision | str:
            try:
                return decide()
            except GatewayError as error:
                return error.code

        router, now_s = self.router, self.now_s
        whole = answer(lambda: router.decide_fully(facts, binding, now_s, excluded, avoided, by_ring))
        asked = super().decide
        assert answer(lambda: asked(facts, binding, excluded, avoided, by_ring)) == whole
        return asked(facts, binding, excluded, avoided, by_ring)


@settings(max_examples=300, deadline=None)
@given(STEPS, SETTINGS)
def test_home_test_decides_as_the_whole_way_does(steps: list[Step], options: dict[str, float]) -> None:
    """Backend, affinity, reason, price, expected cache: equal in any world, errors too."""
    ComparingWorld(Router(RoutingSettings(**options))).play(steps)  # type: ignore[arg-type] # loose test values


def _calls_of_a_stay(num_backends: int, num_messages: int) -> Counter[str]:
    router = ready_router(num_backends)
    history = tuple(f"message {number}" for number in range(num_messages + 2))
    first = request("s", texts=history[:-2])
    decision = router.decide(first, None, 2000.0)
    router.release(router.reserve(first, decision, 2000.0), 2001.0, None, completed=True)
    following, binding = request("s", texts=history), bind(decision)
    router.decide(following, binding, 2002.0)  # builds what is built once per view
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = router.decide(following, binding, 2002.0)
    finally:
        sys.setprofile(before)
    assert found.affinity is Affinity.HIT
    return calls


def test_stay_costs_the_same_in_any_fleet_and_at_any_length() -> None:
    """The calls made for a session that stays do not depend on the backends or on its messages."""
    assert _calls_of_a_stay(3, 10) == _calls_of_a_stay(300, 10) == _calls_of_a_stay(3, 1000)
