"""What a policy decides on: the request, the state of the router, and the contract of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.routing.calibration import CostModel
from gateway.routing.candidates import Candidates
from gateway.routing.load import LoadTable
from gateway.routing.reservation import Reservation
from gateway.routing.settings import RoutingSettings
from gateway.routing.shadow import Chain, ContentIndex, session_line
from gateway.routing.traffic import Traffic
from gateway.values import Api, Binding, Candidate, RequestFacts

_ESTIMATE_MARGIN = 1.1


class PlacementRequest:
    """One placement to decide. Not a dataclass: it is built on every request."""

    __slots__ = (
        "chain",
        "context_tokens",
        "facts",
        "home",
        "is_moved",
        "is_over_bound",
        "is_weighted",
        "now_s",
        "prompt_tokens",
        "shares",
        "slots",
        "tokens_per_byte",
        "trusts_context",
    )

    def __init__(
        self,
        facts: RequestFacts,
        chain: Chain,
        prompt_tokens: float,
        tokens_per_byte: float,
        home: int | None,
        slots: tuple[int, ...],
        shares: dict[int, float] | None,
        now_s: float,
    ) -> None:
        self.facts = facts
        self.chain = chain
        self.prompt_tokens = prompt_tokens
        self.tokens_per_byte = tokens_per_byte
        self.home = home  # slot where the session may stay, or None
        # where it may go, never empty; contains the home if it takes new sessions, or if no other slot does
        self.slots = slots if slots or home is None else (home,)
        self.shares = shares  # effective weights, None: all 1
        self.now_s = now_s
        self.context_tokens = 0  # what the binding says that the home has computed for the session
        self.trusts_context = False  # other replicas route turns that we never see, so home holds all that
        self.is_moved = False  # a session that has lost its home
        self.is_over_bound = False  # set by a policy: its home has as many requests of buckets as it may
        self.is_weighted = False  # an operator has given backends unequal weights


def measure_prompt(facts: RequestFacts, binding: Binding | None, ratio: float) -> tuple[Chain, float]:
    """Return the chain to look up and the prompt's tokens; `ratio` is tokens per byte.

    A Responses API request names its history by an id: the engine's side keeps the text, and only the binding
    knows its size.
    """
    chain: Chain = facts.prefix
    num_bytes = facts.num_prompt_bytes
    known = 0 if binding is None else binding.context_tokens
    if facts.api is Api.RESPONSES and known > num_bytes * ratio and facts.session_key is not None:
        num_bytes = int(known / ratio) + num_bytes
        chain = ()
    return chain or session_line(facts, num_bytes), max(1.0, num_bytes * ratio)


def room_for(facts: RequestFacts, prompt_tokens: float) -> float:
    """Return the context length in tokens that a request needs. A little more, as tokens are estimated."""
    return _ESTIMATE_MARGIN * prompt_tokens + (facts.max_output_tokens or 0)


class RoutingState:
    """The router's state as policies see it: they read it, the router changes it."""

    __slots__ = ("candidates", "content", "costs", "load", "settings", "traffic")

    def __init__(
        self,
        settings: RoutingSettings,
        candidates: Candidates,
        load: LoadTable,
        costs: CostModel,
        traffic: Traffic,
        content: ContentIndex,
    ) -> None:
        self.settings = settings
        self.candidates = candidates
        self.load = load
        self.costs = costs
        self.traffic = traffic
        self.content = content


class Policy(Protocol):
    """Ranks backends for a request.

    `rank` changes nothing. It depends only on its argument, the router's state and earlier events. It returns
    at least one candidate, best first; each is the request's home or one of its slots.

    For each reservation the router calls `on_reserve`, `on_first_token` and `on_release` in this order, each
    at most once. It calls `on_forget` when a backend has lost its cache, or has left the fleet; then its
    reservations are gone too, and no more events come for them.
    """

    name: str
    has_events: bool  # False: the router may skip all calls but `rank` and `on_forget`
    tests_home: bool  # True: the router may skip `rank` for a session that stays (`stays.py`)

    def rank(self, request: PlacementRequest) -> Sequence[Candidate]: ...

    def on_reserve(self, reservation: Reservation) -> None: ...

    def on_first_token(self, reservation: Reservation) -> None: ...

    def on_release(self, reservation: Reservation) -> None: ...

    def on_forget(self, slot: int, *, has_left: bool) -> None: ...


class PolicyBase:
    """Holds the router's state and ignores all events; a policy that handles some sets `has_events`."""

    has_events = False
    tests_home = False

    def __init__(self, state: RoutingState) -> None:
        self._state = state

    def on_reserve(self, reservation: Reservation) -> None:
        """Ignored."""

    def on_first_token(self, reservation: Reservation) -> None:
        """Ignored."""

    def on_release(self, reservation: Reservation) -> None:
        """Ignored."""

    def on_forget(self, slot: int, *, has_left: bool) -> None:
        """Ignored."""
