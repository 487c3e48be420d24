"""Names of policies to policies. One line per policy; `settings.POLICY_NAMES` lists the same names."""

from __future__ import annotations

from collections.abc import Callable

from gateway.routing.policies.bounded_ring import BoundedRingPolicy
from gateway.routing.policies.homing import HomingPolicy
from gateway.routing.policies.kv_cost import KvCostPolicy
from gateway.routing.policies.least_request import LeastRequestPolicy
from gateway.routing.policies.prefix_tree import PrefixTreePolicy
from gateway.routing.policies.round_robin import RoundRobinPolicy
from gateway.routing.policies.session_ring import SessionRingPolicy
from gateway.routing.policies.session_table_least import SessionTableLeastPolicy
from gateway.routing.policies.weighted_scores import WeightedScoresPolicy
from gateway.routing.question import Policy, Surroundings


def make_policy(name: str, surroundings: Surroundings) -> Policy:
    """Return a new policy over this router's state. Raises KeyError for an unknown name."""
    policies: dict[str, Callable[[Surroundings], Policy]] = {
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
    return policies[name](surroundings)
