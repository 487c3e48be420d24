"""Random histories of a fleet and its requests, played into any router.

A history is a list of small steps that hypothesis draws and shrinks. Every number in a step is taken modulo
what there is, so each list is valid.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from routing.routing_worlds import backend, bind, fleet, names, request

from gateway.errors import GatewayError
from gateway.routing.reservation import Reservation
from gateway.routing.router import Router
from gateway.values import Api, Backend, BackendId, BackendState, Binding, Decision, RequestFacts, Usage

Step = tuple[str, int, int, int]

_NAMES = names(4)
_STATES = (
    BackendState.READY,
    BackendState.READY,
    BackendState.DEGRADED,
    BackendState.CORDONED,
    BackendState.DRAINING,
    BackendState.DOWN,
)
_KINDS = ("ask",) * 6 + ("burst", "answer", "answer", "end", "end", "end_all", "wait", "wait")
_RARE = ("change", "leave", "scrape", "others", "closing")
_number = st.integers(0, 63)
STEPS = st.lists(
    st.tuples(st.sampled_from(_KINDS + _RARE), _number, _number, _number), min_size=30, max_size=120
)
SETTINGS = st.fixed_dictionaries(
    {
        "stay_margin_s": st.sampled_from([0.25, 2.0, 0.05, 0.0]),
        "kv_capacity_tokens": st.sampled_from([20_000, 1_000]),
        "slow_start_s": st.sampled_from([0.0, 60.0]),
        "prefill_tokens_per_s": st.sampled_from([10_000.0, 500.0]),
    }
)


class World:
    """Plays a history into a router; `decide` is called for each request and may be overridden."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.now_s = 1000.0
        self.rows: dict[str, Backend] = {name: backend(name, since_s=900.0) for name in _NAMES}
        self.bindings: dict[str, Binding] = {}
        self.turns: dict[str, int] = {}
        self.held: list[Reservation] = []
        self.decisions: list[Decision] = []
        self.generation = 0
        self.publish()

    def play(self, steps: list[Step]) -> None:
        for kind, *numbers in steps:
            getattr(self, kind)(*numbers)

    # -- what the router is told, to be overridden -------------------------------------------------

    def decide(
        self,
        facts: RequestFacts,
        binding: Binding | None,
        excluded: frozenset[BackendId],
        avoided: frozenset[BackendId],
        by_ring: bool,
    ) -> Decision:
        return self.router.decide(
            facts, binding, self.now_s, excluded=excluded, avoided=avoided, by_ring=by_ring
        )

    def send(self, facts: RequestFacts, decision: Decision) -> Reservation:
        return self.router.reserve(facts, decision, self.now_s)

    def finish(self, reservation: Reservation, usage: Usage | None, completed: bool) -> None:
        self.router.release(reservation, self.now_s, usage, completed)

    # -- steps --------------------------------------------------------------------------------------

    def publish(self) -> None:
        self.generation += 1
        self.router.observe_view(fleet(*self.rows.values(), generation=self.generation), self.now_s)
        self.held = [one for one in self.held if one.backend_id in self.rows]

    def ask(self, who: int, how: int, what: int) -> None:
        asked = self._ask(who, how, what)
        if asked is not None:
            self.held.append(self.send(*asked))

    def burst(self, who: int, how: int, what: int) -> None:
        """Decide for some requests before the first of them is sent."""
        asked = [self._ask(who + number, how, what + number) for number in range(6)]
        self.held += [self.send(*one) for one in asked if one is not None]

    def _ask(self, who: int, how: int, what: int) -> tuple[RequestFacts, Decision] | None:
        label = f"s{who % 5}"
        session = None if who % 5 == 4 else label
        turn = self.turns[label] = self.turns.get(label, 0) + 1
        facts = request(
            session,
            prompt=(None, "p", "q")[what % 3],
            texts=tuple(f"{label} {number}" for number in range(2 * (turn % 6) + 1)),
            size=(40, 400, 4000)[what % 5 % 3],
            is_stream=bool(what & 1),
            model=(None, None, "m", "n")[how % 4],
            api=Api.RESPONSES if how % 5 == 0 else Api.CHAT,
        )
        excluded = frozenset({BackendId(_NAMES[how % len(_NAMES)])}) if how % 11 == 5 else frozenset()
        some = {BackendId(_NAMES[what % len(_NAMES)]), BackendId(_NAMES[who % len(_NAMES)])}
        avoided = frozenset(some) if how % 5 == 3 else frozenset()
        try:
            decision = self.decide(facts, self.bindings.get(label), excluded, avoided, how % 13 == 7)
        except GatewayError:
            return None
        self.decisions.append(decision)
        if session is not None:
            epoch = self.rows[decision.backend_id].epoch
            self.bindings[label] = bind(decision, epoch=epoch, context_tokens=100 * (what % 9))
        return facts, decision

    def answer(self, who: int, *_: int) -> None:
        if self.held:
            self.router.first_token(self.held[who % len(self.held)], self.now_s)

    def end(self, who: int, how: int, what: int) -> None:
        if not self.held:
            return
        reservation = self.held.pop(who % len(self.held))
        tokens = 30 * (what + 1)
        cached = None if how % 5 == 0 else tokens * (how % 4) // 4
        usage = Usage(prompt_tokens=tokens, completion_tokens=what, cached_tokens=cached)
        self.finish(reservation, None if how % 5 == 0 else usage, how % 6 != 0)

    def end_all(self, _: int, how: int, what: int) -> None:
        for number in range(len(self.held)):
            self.now_s += 0.001
            self.end(number, how + number, what + number)

    def wait(self, how: int, *_: int) -> None:
        self.now_s += (0.0, 0.01, 0.1, 1.0, 5.0, 20.0, 100.0, 4000.0)[how % 8]

    def change(self, which: int, state: int, how: int) -> None:
        name = _NAMES[which % len(_NAMES)]
        row = self.rows.get(name) or backend(name, epoch=7)
        self.rows[name] = replace(
            row,
            state=_STATES[state % len(_STATES)],
            epoch=row.epoch + (how % 3 == 0),
            since_s=self.now_s,
            weight=(1.0, 1.0, 2.0, 0.0)[how % 4],
            models=(None, None, frozenset({"m"}), frozenset({"m", "n"}))[state % 4],
        )
        self.publish()

    def leave(self, which: int, *_: int) -> None:
        self.rows.pop(_NAMES[which % len(_NAMES)], None)
        self.publish()

    def scrape(self, which: int, running: int, waiting: int) -> None:
        self.router.observe_load(
            BackendId(_NAMES[which % len(_NAMES)]),
            num_running=running,
            num_waiting=waiting % 8,
            kv_usage=0.5,
            now_s=self.now_s,
        )

    def others(self, which: int, work: int, num_requests: int) -> None:
        self.router.observe_others(
            {BackendId(_NAMES[which % len(_NAMES)]): (work / 40, num_requests)}, self.now_s
        )

    def closing(self, *_: int) -> None:
        """End all requests, so that a quiet fleet comes up too."""
        while self.held:
            self.finish(self.held.pop(), None, completed=False)
