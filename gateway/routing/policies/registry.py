"""Names of policies to policies. One line per policy; `settings.POLICY_NAMES` lists the same names."""

from __future__ import annotations

from collections.abc import Callable

from gateway.replay.rivals.bounded_ring import BoundedRingPolicy
from gateway.replay.rivals.kv_cost import KvCostPolicy
from gateway.replay.rivals.least_request import LeastRequestPolicy
from gateway.replay.rivals.prefix_tree import PrefixTreePolicy
from gateway.replay.rivals.round_robin import RoundRobinPolicy
from gateway.replay.rivals.session_ring import SessionRingPolicy
from gateway.replay.rivals.session_table_least import SessionTableLeastPolicy
from gateway.replay.rivals.weighted_scores import WeightedScoresPolicy
from gateway.routing.placement_request import Policy, RoutingState
from gateway.routing.policies.homing import HomingPolicy


def make_policy(name: str, state: RoutingState) -> Policy:
    """Return a new policy over this router's state. Raises KeyError for an unknown name."""
    policies: dict[str, Callable[[RoutingState], Policy]] = {
        "homing": HomingPolicy,
        "round_robin": RoundRobinPolicy,
        "least_request": LeastRequestPolicy,
        "session_ring": SessionRingPolicy,
        "bounded_ring": BoundedRingPolicy,
        "session_table_least": SessionTableLeastPolicy,
        "prefix_tree": PrefixTreePolicy,
        "kv_cost": KvCostPolicy,
        "weighted_scores": WeightedScoresPolicy,
    }
    return policies[name](state)
