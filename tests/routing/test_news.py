"""What another replica has sent counts as if it were our own, and nothing that it says does harm."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing.routing_worlds import bind, ready_router, request

from gateway.replay import workloads
from gateway.replay.engines import EngineSpeed
from gateway.replay.measures import measure
from gateway.replay.simulator import Replicas, SimulationPlan, simulate
from gateway.routing.news import MAX_PLACED, News, Placed
from gateway.routing.router import Router
from gateway.values import Decision, Message, RequestFacts

SYSTEM = "A long system prompt"


def replicas() -> tuple[Router, Router]:
    one, two = ready_router(4), ready_router(4)
    one.news.is_collecting = two.news.is_collecting = True
    return one, two


def send(router: Router, facts: RequestFacts, now_s: float) -> Decision:
    decision = router.decide(facts, None, now_s)
    router.release(router.reserve(facts, decision, now_s), now_s + 1.0, None, completed=True)
    return decision


def tell(source: Router, target: Router, now_s: float) -> None:
    """As over the wire."""
    target.observe_news(msgspec.json.decode(msgspec.json.encode(source.news.take()), type=News), now_s)


def test_a_new_session_is_placed_alike_at_any_replica() -> None:
    """One has sent long system prompts; the other places the next request as if they were its own."""
    one, two = replicas()
    for number in range(12):
        send(one, request(f"a{number}", prompt=f"{SYSTEM} {number % 3}", size=20_000), 1000.0 + number)
    question = request("b", prompt=f"{SYSTEM} 0", size=20_000)
    assert two.decide(question, None, 1013.0).expected_cached_tokens == 0
    tell(one, two, 1013.0)
    decisions = [router.decide(question, None, 1014.0) for router in (one, two)]
    assert decisions[0].backend_id == decisions[1].backend_id
    assert [decision.expected_cached_tokens for decision in decisions] == [5_000, 5_000]


def test_turns_of_a_long_conversation_are_known_whoever_had_them() -> None:
    """Only its last messages are told with each turn."""
    one, two = replicas()
    texts = tuple(f"message {number}" for number in range(120))
    binding = None
    for end in range(2, 121, 2):
        facts, now_s = request("s", texts=texts[:end], size=2_000), 1000.0 + end
        decision = one.decide(facts, binding, now_s)
        binding = bind(decision)
        one.release(one.reserve(facts, decision, now_s), now_s + 1.0, None, completed=True)
        news = one.news.take()
        assert len(news.placed[0].lines) <= 8
        two.observe_news(news, now_s + 1.0)
    last = request("s", texts=(*texts, "more"), size=2_000)
    decisions = [router.decide(last, binding, 1200.0) for router in (one, two)]
    assert decisions[0].backend_id == decisions[1].backend_id
    assert decisions[1].expected_cached_tokens == decisions[0].expected_cached_tokens > 50_000


def test_after_lost_rounds_what_hangs_in_the_air_is_left_out() -> None:
    """A conversation of which only the end is told: not known, and nothing breaks."""
    one, two = replicas()
    texts = tuple(f"message {number}" for number in range(40))
    first = send(one, request("s", texts=texts[:20], size=2_000), 1000.0)
    one.news.take()  # lost
    facts = request("s", texts=texts, size=2_000)
    one.release(
        one.reserve(facts, one.decide(facts, bind(first), 1002.0), 1002.0), 1003.0, None, completed=True
    )
    tell(one, two, 1003.0)
    assert two.decide(facts, None, 1004.0).expected_cached_tokens == 0
    assert two.decide(request("s", texts=texts[:30], size=2_000), None, 1004.0).expected_cached_tokens == 0


def test_what_was_told_is_told_once_and_not_passed_on() -> None:
    """Or news would go round for ever."""
    one, two = replicas()
    send(one, request("a", size=4_000), 1000.0)
    tell(one, two, 1001.0)
    assert one.news.take() == News()
    assert two.news.take() == News()


def test_alone_nothing_is_collected() -> None:
    """It would fill memory."""
    router = ready_router(2)
    send(router, request("a"), 1000.0)
    assert router.news.take() == News()


def test_a_round_is_bounded() -> None:
    """The latest requests are told."""
    one, _ = replicas()
    for number in range(MAX_PLACED + 10):
        send(one, request(f"s{number}"), 1000.0 + number)
    assert len(one.news.take().placed) == MAX_PLACED


numbers = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, -1, 2**64 - 1, 100])
placed = st.builds(
    Placed,
    backend=st.integers(-2, 6),
    before=numbers,
    lines=st.lists(st.tuples(numbers, numbers), max_size=8).map(tuple),
    work_s=st.floats(),
)


@given(
    st.lists(st.builds(News, st.just(("b0", "b1", "gone", "b3")), st.lists(placed, max_size=5).map(tuple)))
)
def test_nothing_that_is_told_does_harm(told: list[News]) -> None:
    """Absurd numbers, backends that are not here: skipped; decisions go on, with finite prices."""
    _, router = replicas()
    for number, news in enumerate(told):
        router.observe_news(news, 1000.0 + number)
    decision = router.decide(request("s", prompt=SYSTEM), None, 2000.0)
    assert 0.0 <= (decision.ranked[0].price or 0.0) < 1e9
    for prompt in ((100,), (100, 2**64 - 1), (2**64 - 1, 100)):
        messages = tuple(Message(chain_hash=key, num_bytes=10_000) for key in prompt)
        router.decide(request("s", prefix=messages), None, 2001.0)


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_replicas_find_what_one_would_find(num_replicas: int) -> None:
    """Simulated: at least 0.95 of the hits of one gateway."""

    trace = workloads.documents(300, 300.0, seed=3)
    speed = EngineSpeed(prefill_s_per_token=1 / 15_000, cache_tokens=400_000)
    hits = []
    for count in (1, num_replicas):
        exchange_s = 1.0 if count > 1 else None
        plan = SimulationPlan(
            num_engines=8, speed=speed, replicas=Replicas(count=count, exchange_s=exchange_s), warm_up_s=60.0
        )
        hits.append(measure(simulate(trace, plan)).hit)
    assert hits[1] >= 0.95 * hits[0]
