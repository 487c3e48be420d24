"""Options of placement: every number that a decision depends on, with its default and the reason.

Invariant: values that pass `__post_init__` keep every formula of this package finite. This module does not
know where the options come from (`gateway/config/config.py` composes the file).
"""

from __future__ import annotations

import math

import msgspec

from gateway.routing.ring import MAX_BACKEND_POINTS

POLICY_NAMES = (
    "homing",
    "round_robin",
    "least_request",
    "session_ring",
    "bounded_ring",
    "session_table_least",
    "prefix_tree",
    "kv_cost",
    "weighted_scores",
)

FIXED_WHILE_RUNNING = (
    "policy",
    "virtual_nodes",
    "prefill_tokens_per_s",
    "prefill_fixed_s",
    "attention_per_token",
    "shadow_entries_per_backend",
    "tokens_per_byte",
    "traffic_window_s",
    "recent_work_window_s",
    "load_stale_s",
)
"""Options that learned values are measured in, or that all replicas must share."""


class RoutingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How requests are placed on backends."""

    policy: str = "homing"
    """Placement policy. All but `homing` are for comparison with other gateways."""

    virtual_nodes: int = 160
    """Ring points of a backend of weight 1, at most 4096. With 160, the fullest backend stays within
    1.2 × the mean. Where weights would give one backend more than 4096 points, or all together more than
    262144, each gets proportionally fewer."""

    ring_candidates: int = 3
    """Number of ring successors of a session that are candidates for it."""

    stay_margin_s: float = 0.25
    """A bound session moves only if it saves at least this much time."""

    stay_gain: float = 0.3
    """A bound session moves only if the price is lower than at home by this share."""

    placement_bound: float = 1.2
    """New sessions go only to backends whose recent work is at most this × the mean."""

    placement_floor: float = 0.05
    """While no backend's utilisation by recent work is above this, the ring decides about new sessions of
    which no backend has anything cached, so that replicas agree."""

    load_bound: float = 1.25
    """Maximum in-flight requests, × the mean, that a bucket key or a prompt group may put on a backend."""

    load_bound_floor_requests: int = 4
    """Number of in-flight requests that the load bound always allows, because small counts are noise."""

    decode_price_s: float = 0.002
    """What a running request adds to the price of its backend, divided by the free share of KV memory."""

    tie_gain: float = 0.02
    """Prices within this share of the best count as equal. Then the ring decides, so that replicas agree."""

    tie_margin_s: float = 0.002
    """Prices within this many seconds of the best count as equal, too."""

    slow_start_s: float = 60.0
    """Time in which a backend that became ready takes a growing share of new sessions. 0 turns it off."""

    slow_start_floor: float = 0.1
    """Share of its weight with which a backend begins its slow start."""

    prefill_tokens_per_s: float = 10_000.0
    """Assumed prefill speed of a backend until its answers have been measured."""

    prefill_fixed_s: float = 0.01
    """Time to first token of a fully cached prompt on an idle backend."""

    attention_per_token: float = 1.9e-5
    """Growth of a token's prefill cost per token of context (for a dense 70B GQA model it doubles at 53K)."""

    kv_capacity_tokens: int = 500_000
    """Assumed cache size of a backend that does not report its own."""

    shadow_trust: float = 0.95
    """Share of a backend's cache that the shadow assumes to be usable at start. Reports correct it."""

    shadow_entries_per_backend: int = 100_000
    """Maximum number of messages in the shadow of one backend (about 250 bytes each)."""

    tokens_per_byte: float = 0.25
    """Assumed tokens per byte of prompt text until engines have reported usage."""

    traffic_window_s: float = 120.0
    """Averaging window of the arrival rate and the utilisation."""

    recent_work_window_s: float = 300.0
    """Averaging window of the recent work that `placement_bound` compares."""

    load_stale_s: float = 15.0
    """Scraped load older than this is ignored."""

    retry_after_s: float = 2.0
    """Retry-After of the answer if no backend can take a request."""

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise ValueError(f"policy must be one of {', '.join(POLICY_NAMES)}, not {self.policy!r}")
        positive = (
            "virtual_nodes",
            "prefill_tokens_per_s",
            "kv_capacity_tokens",
            "shadow_entries_per_backend",
            "tokens_per_byte",
            "traffic_window_s",
            "recent_work_window_s",
            "load_stale_s",
            "shadow_trust",
            "slow_start_floor",
        )
        for name in positive:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number above 0, not {value!r}")
        if self.virtual_nodes > MAX_BACKEND_POINTS:
            raise ValueError(f"virtual_nodes must be at most {MAX_BACKEND_POINTS}, not {self.virtual_nodes}")
        not_negative = (
            "ring_candidates",
            "placement_floor",
            "stay_margin_s",
            "stay_gain",
            "load_bound_floor_requests",
            "decode_price_s",
            "tie_gain",
            "tie_margin_s",
            "slow_start_s",
            "prefill_fixed_s",
            "attention_per_token",
            "retry_after_s",
        )
        for name in not_negative:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number, 0 or above, not {value!r}")
        if not (1 <= self.placement_bound < math.inf and 1 <= self.load_bound < math.inf):
            raise ValueError(
                "placement_bound and load_bound must be finite and at least 1: below it no backend takes load"
            )
        if self.slow_start_floor > 1:
            raise ValueError("slow_start_floor is a share: at most 1")
