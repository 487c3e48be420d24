"""A request counted on a backend, from `Router.reserve` to `Router.release`.

It is mutable and slotted, not a frozen value: one is built for every request, and the router marks it as
answered and as released, so that each happens once.
"""

from __future__ import annotations

from gateway.routing.shadow import Chain
from gateway.values import BackendId, RequestFacts


class Reservation:
    """A request counted on a backend; pass it to `first_token` and `release`."""

    __slots__ = (
        "backend_id",
        "chain",
        "expected_cached_tokens",
        "facts",
        "is_answered",
        "is_released",
        "life",
        "prefill_s",
        "prompt_tokens",
        "sent_s",
        "service_s",
        "slot",
    )

    def __init__(
        self, facts: RequestFacts, backend_id: BackendId, slot: int, life: int, chain: Chain
    ) -> None:
        self.facts = facts
        self.backend_id = backend_id
        self.slot = slot
        self.life = life  # which owner of the slot it is counted for
        self.chain = chain
        self.prompt_tokens = 0.0
        self.expected_cached_tokens = 0
        self.prefill_s = 0.0
        self.sent_s = 0.0
        self.service_s: float | None = None  # how long its prefill took, if known
        self.is_answered = False
        self.is_released = False
