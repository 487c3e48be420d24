"""A request counted on a backend, from `Router.reserve` to `Router.release`.

It is mutable and slotted, not a frozen value: one is built for every request, and the router marks it as
answered and as released, so that each happens once.
"""

from __future__ import annotations

from gateway.routing.shadow import Chain, session_line
from gateway.values import BackendId, Decision, RequestFacts, Usage


class Reservation:
    """A request counted on a backend; pass it to `first_token`, and to `note_ended` or `release`."""

    __slots__ = (
        "affinity",
        "backend_id",
        "chain",
        "expected_cached_tokens",
        "facts",
        "is_answered",
        "is_released",
        "life",
        "num_taken",
        "prefill_s",
        "prompt_tokens",
        "sent_s",
        "service_s",
        "slot",
        "usage",
    )

    def __init__(
        self,
        facts: RequestFacts,
        decision: Decision,
        backend_id: BackendId,
        slot: int,
        life: int,
        sent_s: float,
    ) -> None:
        self.facts = facts
        self.backend_id = backend_id
        self.slot = slot
        self.life = life  # which owner of the slot it is counted for
        self.chain: Chain = facts.prefix or session_line(facts, facts.num_prompt_bytes)
        self.affinity = decision.affinity
        self.prompt_tokens = float(decision.prompt_tokens or 1)
        self.sent_s = sent_s
        self.expected_cached_tokens = 0
        self.prefill_s = 0.0
        self.service_s: float | None = None  # how long its prefill took, if known
        self.usage: Usage | None = None  # of a complete answer, to learn from
        self.is_answered = False
        self.is_released = False
        self.num_taken = 0  # of its two entries in batches: sent, ended
