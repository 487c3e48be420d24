"""Where a request goes that names an object of an engine: to the backend that made it, and nowhere else.

Load and prices decide nothing here: no other backend has the object. Pure.
"""

from __future__ import annotations

from typing import Final

from gateway.errors import NoBackend, NotFound
from gateway.values import Affinity, BackendId, Binding, Candidate, Decision, FleetView, RequestFacts

REASON: Final = "object_maker"
_BYTES_PER_TOKEN: Final = 4
_RETRY_AFTER_S: Final = 1.0


def check_maker(view: FleetView, maker: BackendId) -> None:
    """Raise NotFound for a maker that has left the fleet, NoBackend for one that cannot be reached now."""
    backend = view.get(maker)
    if backend is None:
        raise NotFound("Nothing has this id: the backend that made it has left.")
    if not backend.state.is_routable:
        raise NoBackend("the backend that has this object is not ready now", retry_after_s=_RETRY_AFTER_S)


def decide_for_maker(facts: RequestFacts, binding: Binding | None, maker: BackendId) -> Decision:
    """Send a request to the maker of what it names; its session moves there, as its history names it too."""
    if binding is not None:
        affinity = Affinity.HIT if binding.backend_id == maker else Affinity.MOVED
    else:
        affinity = Affinity.NEW if facts.session_key is not None and facts.sets_binding else Affinity.HIT
    return Decision(
        backend_id=maker,
        affinity=affinity,
        reason=REASON,
        ranked=(Candidate(backend_id=maker, price=0.0, reason=REASON),),
        key_source=facts.key_source,
        prompt_tokens=max(1, facts.num_prompt_bytes // _BYTES_PER_TOKEN),
    )
