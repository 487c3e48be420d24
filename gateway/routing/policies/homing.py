"""The default policy: stay home while it pays, else the cheapest place for everybody.

Price of a backend = (wait + own prefill) · (1 + own prefill · pressure), see `traffic.py`; the prefill
counts only what the backend is not believed to hold (`shadow.py`). A bound session stays home unless
another place is cheaper by a margin and a share: moving costs recomputation later that no price sees.
A new session goes only to backends near the mean of recent work, because it brings later turns; among
equal prices the ring decides, so that replicas agree without a round trip.

Cost: O(1) for a session at a home that is not busy; O(backends) otherwise, with small constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gateway.routing.question import EventlessPolicy, Question
from gateway.routing.shadow import Level
from gateway.values import Candidate

_EVALUATE_ALL = 12  # fleets up to this size are priced whole


class HomingPolicy(EventlessPolicy):
    """Session table, shadow content and priced moves."""

    name = "homing"

    def rank(self, question: Question) -> list[Candidate]:
        around = self._around
        settings = around.settings
        pressure = around.traffic.pressure(question.now_s, len(question.slots), around.costs.fleet_scale)
        home = None
        if question.home is not None:
            cached = around.content.cached_bytes(question.home, question.chain)
            home = self._price(question, question.home, cached, pressure, "home")
            if home.price <= settings.stay_margin_s:
                return [home]
        levels = around.content.levels(question.chain)
        open_slots = question.slots if home is not None else self._open_slots(question)
        cached_of: dict[int, int] = {}
        for slots, num_bytes in reversed(levels):
            cached_of.update(dict.fromkeys(slots, num_bytes))
        chosen = self._shortlist(question, open_slots, levels)
        ranked = [
            self._price(
                question, slot, num := cached_of.get(slot, 0), pressure, "content" if num else "least_work"
            )
            for slot in chosen
            if slot != question.home
        ]
        ranked.sort(key=lambda candidate: candidate.price)
        if home is None:
            return self._break_ties(question, ranked)
        if not ranked or home.price <= ranked[0].price + max(
            settings.stay_margin_s, settings.stay_gain * home.price
        ):
            return [home, *ranked]
        return [*ranked, home]

    def _price(
        self, question: Question, slot: int, cached_bytes: int, pressure: float, reason: str
    ) -> Candidate:
        around = self._around
        prompt = question.prompt_tokens
        cached = min(cached_bytes * question.tokens_per_byte, prompt - 1.0)
        prefill_s = around.costs.models[slot].seconds(prompt - cached, cached)
        wait_s = around.load.wait[slot]
        return Candidate(
            backend_id=around.roster.backend_id(slot),
            price=(wait_s + prefill_s) * (1.0 + prefill_s * pressure),
            reason=reason,
            expected_cached_tokens=int(cached),
            wait_s=wait_s,
            prefill_s=prefill_s,
        )

    def _open_slots(self, question: Question) -> tuple[int, ...]:
        """Slots that may take a new session: near the mean of recent work, and within the load bound."""
        settings, load, shares = self._around.settings, self._around.load, question.shares
        slots, recent = question.slots, load.recent
        facts = question.facts
        if facts.obeys_load_bound or facts.session_key is None:
            slots = self._within_load_bound(question)
        total_share = len(slots) if shares is None else sum(shares[slot] for slot in slots)
        mean = sum(recent[slot] for slot in slots) / total_share
        floor_s = settings.placement_floor * settings.recent_work_window_s
        limit = max(settings.placement_bound * mean, load.stored(floor_s, question.now_s))
        if shares is None:
            return tuple(slot for slot in slots if recent[slot] <= limit) or slots
        return tuple(slot for slot in slots if recent[slot] <= limit * shares[slot]) or slots

    def _within_load_bound(self, question: Question) -> tuple[int, ...]:
        settings, in_flight, shares = self._around.settings, self._around.load.in_flight, question.shares
        slots = question.slots
        total = sum(in_flight[slot] for slot in slots) + 1
        total_share = float(len(slots)) if shares is None else sum(shares[slot] for slot in slots)
        floor = settings.load_bound_floor_requests
        kept = []
        for slot in slots:
            share = 1.0 if shares is None else shares[slot]
            if in_flight[slot] < max(floor, math.ceil(settings.load_bound * total * share / total_share)):
                kept.append(slot)
        return tuple(kept) or slots

    def _shortlist(
        self, question: Question, open_slots: tuple[int, ...], levels: list[Level]
    ) -> Iterable[int]:
        """Slots worth pricing. Among equal content only the least wait can win, so few suffice."""
        if len(open_slots) <= _EVALUATE_ALL:
            return open_slots
        wait = self._around.load.wait
        allowed = frozenset(open_slots)
        short: dict[int, None] = {}
        for slots, _ in levels:
            usable = [slot for slot in slots if slot in allowed]
            if usable:
                short[min(usable, key=wait.__getitem__)] = None
            if len(short) >= _EVALUATE_ALL:
                break
        for slot in self._ring_slots(question, allowed):
            short[slot] = None
        short[min(open_slots, key=wait.__getitem__)] = None
        return short

    def _ring_slots(self, question: Question, allowed: frozenset[int]) -> list[int]:
        key = question.facts.session_key or question.facts.prompt_key
        if key is None:
            return []
        roster, found = self._around.roster, []
        for backend_id in roster.ring.walk(key):
            slot = roster.slot_of[backend_id]
            if slot in allowed:
                found.append(slot)
                if len(found) >= self._around.settings.ring_candidates:
                    break
        return found

    def _break_ties(self, question: Question, ranked: list[Candidate]) -> list[Candidate]:
        """Move the ring's choice to the front if its price is as good as the best."""
        settings, roster = self._around.settings, self._around.roster
        limit = ranked[0].price + max(settings.tie_margin_s, settings.tie_gain * ranked[0].price)
        ties = {roster.slot_of[c.backend_id]: c for c in ranked if c.price <= limit}
        if len(ties) == 1:
            return ranked
        ring_slots = self._ring_slots(question, frozenset(ties))
        if ring_slots:
            winner = ring_slots[0]
        else:
            turn, in_flight = self._around.load.turn, self._around.load.in_flight
            winner = min(ties, key=lambda slot: (in_flight[slot], turn[slot], slot))
        best = ties[winner]
        return [best, *(candidate for candidate in ranked if candidate is not best)]
