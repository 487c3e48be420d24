"""The policies of other gateways: by name, in a router, in a recording and in a live gateway."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.gateway_world import GatewayWorld
from msgspec.structs import replace
from routing.routing_worlds import backend, bind, fleet, names, request

from gateway.replay.recording import replay
from gateway.replay.rivals.registry import ALL_POLICIES
from gateway.routing.placement_request import PolicyBase
from gateway.routing.recording import RecordingRouter
from gateway.routing.router import Router
from gateway.routing.settings import POLICY_NAMES, RoutingSettings


def test_every_policy_of_the_settings_exists_under_its_name() -> None:
    """`routing.policy` accepts exactly the names of the registry, and each class has its own."""
    assert tuple(ALL_POLICIES) == POLICY_NAMES
    for name in POLICY_NAMES:
        router = Router(RoutingSettings(policy=name), policies=ALL_POLICIES)
        router.observe_view(fleet(backend("a")), 0.0)
        assert router.decide(request("s"), None, 0.0).policy == name


def test_a_router_without_rivals_refuses_them() -> None:
    """A router built alone knows homing; another name fails at once, with what there is."""
    with pytest.raises(ValueError, match="no policy 'session_ring', only homing"):
        Router(RoutingSettings(policy="session_ring"))


def test_a_rival_survives_changed_settings_and_replays() -> None:
    """Reconfiguring keeps the policy; its recording replays bit for bit."""
    lines: list[bytes] = []
    settings = RoutingSettings(policy="session_ring")
    router = RecordingRouter(settings, lines.append, policies=ALL_POLICIES)
    router.observe_view(fleet(*(backend(name) for name in names(4))), 0.0)
    before = router.decide(request("s"), None, 0.0)
    router.reserve(request("s"), before, 0.0)
    router.reconfigure(replace(settings, slow_start_s=5.0))
    after = router.decide(request("s"), bind(before), 1.0)
    assert (after.policy, after.backend_id) == ("session_ring", before.backend_id)
    assert list(replay(lines)) == []


async def test_a_live_gateway_runs_a_rival_through_a_reload(tmp_path: Path) -> None:
    """`routing.policy: session_ring` works from the configuration file, through a reload, and recorded."""
    recording = tmp_path / "decisions.jsonl"
    routing = {"policy": "session_ring"}
    async with GatewayWorld(num_backends=3, routing=routing, record_path=recording) as world:
        for number in range(6):
            await world.chat(f"s{number}")
        world.data["routing"] = {**routing, "slow_start_s": 5.0}
        await world.gateways[0].reloader.reload()
        answer = await world.chat("s0")
        assert answer.status_code == 200
    lines = recording.read_bytes().splitlines()
    assert b'"event":"reconfigure"' in b"".join(lines)
    decided = [line for line in lines if b'"event":"decide"' in line]
    assert all(b'"policy":"session_ring"' in line for line in decided)
    assert list(replay(lines)) == []


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_policies_that_handle_events_say_so(name: str) -> None:
    """The router skips events for a policy without `has_events`, so every policy that handles one sets it."""
    policy = ALL_POLICIES[name]
    handled = [
        event
        for event in ("on_reserve", "on_first_token", "on_release")
        if getattr(policy, event) is not getattr(PolicyBase, event)
    ]
    assert policy.has_events == bool(handled)  # type: ignore[attr-defined] # the factories are classes


def test_a_prefix_tree_grows_with_what_is_sent() -> None:
    """The tree of routed prompts brings a second turn to the backend of the first, with no binding."""
    router = Router(RoutingSettings(policy="prefix_tree"), policies=ALL_POLICIES)
    router.observe_view(fleet(backend("a"), backend("b")), 0.0)
    facts = request(texts=("a long document", "a question"), size=40_000)
    first = router.decide(facts, None, 0.0)
    router.reserve(facts, first, 0.0)
    again = router.decide(facts, None, 1.0)
    assert (again.backend_id, again.ranked[0].reason) == (first.backend_id, "prefix")
