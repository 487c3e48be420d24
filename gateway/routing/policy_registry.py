"""Placement policies by name. A router knows `homing`; whoever builds it may pass more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from gateway.routing.default_policy import HomingPolicy
from gateway.routing.placement_request import Policy, RoutingState

PolicyFactory = Callable[[RoutingState], Policy]
POLICIES: Mapping[str, PolicyFactory] = MappingProxyType({HomingPolicy.name: HomingPolicy})


def make_policy(name: str, state: RoutingState, policies: Mapping[str, PolicyFactory]) -> Policy:
    """Return a new policy over this router's state. Raises ValueError if `policies` has no such name."""
    factory = policies.get(name)
    if factory is None:
        raise ValueError(f"this router has no policy {name!r}, only {', '.join(policies)}")
    return factory(state)
