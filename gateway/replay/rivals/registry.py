"""All policies by name, to be passed to a `Router`: homing, and those of other gateways."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gateway.replay.rivals.bounded_ring import BoundedRingPolicy
from gateway.replay.rivals.kv_cost import KvCostPolicy
from gateway.replay.rivals.least_request import LeastRequestPolicy
from gateway.replay.rivals.prefix_tree import PrefixTreePolicy
from gateway.replay.rivals.round_robin import RoundRobinPolicy
from gateway.replay.rivals.session_ring import SessionRingPolicy
from gateway.replay.rivals.session_table_least import SessionTableLeastPolicy
from gateway.replay.rivals.weighted_scores import WeightedScoresPolicy
from gateway.routing.policy_registry import POLICIES, PolicyFactory

ALL_POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        **POLICIES,
        "round_robin": RoundRobinPolicy,
        "least_request": LeastRequestPolicy,
        "session_ring": SessionRingPolicy,
        "bounded_ring": BoundedRingPolicy,
        "session_table_least": SessionTableLeastPolicy,
        "prefix_tree": PrefixTreePolicy,
        "kv_cost": KvCostPolicy,
        "weighted_scores": WeightedScoresPolicy,
    }
)
"""What `routing.policy` may name; `gateway.routing.settings.POLICY_NAMES` lists the same names."""
