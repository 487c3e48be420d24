"""The default policy: stay home while it pays, else go to the place that costs everybody least.

Price of a backend = (wait + own prefill) · (1 + own prefill · pressure), see `traffic.py`, and what the
request costs those that are there: they are evicted, or run slower (`stays.room_price`). The prefill counts
only what the backend does not seem to hold (`shadow.py`). A bound session moves only if another backend is
cheaper by both a margin and a share, because moving causes recomputation later that no price includes; not so
a session that its home has dropped. A new session goes only to backends near the mean of recent work, because
it brings later turns. Among equal prices the ring decides, so that replicas agree without a round trip.

Cost: O(1) for a session at a home that is not busy; otherwise O(backends), with small constants.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from gateway.routing.placement_request import PlacementRequest, PolicyBase
from gateway.routing.shadow import Level
from gateway.routing.stays import Priced, weigh_home
from gateway.values import Candidate

_PRICE_ALL = 12  # in fleets up to this size every backend is priced
_STARVED = 0.5  # of its share of recent work; see `_open_slots`
_MIN_SHARED_BYTES = 1_024  # a shorter prefix is computed anew in no time
_SHOWN = 2  # candidates in a decision


class HomingPolicy(PolicyBase):
    """Session homes, shadow content and priced moves."""

    name = "homing"
    tests_home = True

    def rank(self, request: PlacementRequest) -> list[Candidate]:
        state, home_slot = self._state, request.home
        settings = state.settings
        if home_slot is not None and not self._is_within_bound(request, home_slot):
            request.is_over_bound, home_slot = True, None
        pressure = state.traffic.pressure(request.now_s, len(request.slots), state.costs.fleet_scale)
        home: Priced | None = None
        is_held = False
        if home_slot is not None:
            home, stays = weigh_home(
                state,
                home_slot,
                request.chain,
                request.prompt_tokens,
                request.tokens_per_byte,
                request.context_tokens if request.trusts_context else 0.0,
                pressure,
            )
            if stays:
                return [self._candidate(home, home_slot)]
            is_held = 2.0 * home[2] >= min(request.context_tokens, request.prompt_tokens)
        multiples = None if is_held else self._multiples(request)
        levels = state.content.levels(request.chain)
        is_cached = bool(levels) and levels[0][1] >= _MIN_SHARED_BYTES
        open_slots = request.slots
        if not is_held:
            open_slots = self._open_slots(request, multiples, is_cached=is_cached)
        slots = self._shortlist(request, open_slots, levels)
        priced = self._price(request, slots, _cached_of(slots, levels), pressure, multiples)
        priced.sort()
        if home is None:
            return self._candidates(self._break_ties(request, priced), request.home)
        away = [item for item in priced if item[1] != home_slot]
        gain = max(settings.stay_margin_s, settings.stay_gain * home[0])
        if away and not is_held and self._has_room(request, away[0]):
            gain = self._tie(home[0])
        stays = not away or home[0] <= away[0][0] + gain
        return self._candidates([home, *away] if stays else [away[0], home, *away[1:]], home_slot)

    def _price(
        self,
        request: PlacementRequest,
        slots: Collection[int],
        cached_of: Mapping[int, int],
        pressure: float,
        multiples: Mapping[int, float] | None,
    ) -> list[Priced]:
        """Return (price, slot, cached tokens, wait, prefill) of each slot. A hot loop with few calls."""
        state = self._state
        models, wait, free_bytes = state.costs.models, state.load.wait, state.content.free_bytes
        load, decode_s = state.load, state.settings.decode_price_s
        in_flight, unanswered, foreign = load.in_flight, load.unanswered, load.foreign_requests
        prompt, ratio = request.prompt_tokens, request.tokens_per_byte
        free = [free_bytes(slot) * ratio for slot in slots]
        # a new session grows: where it has room to double it disturbs nobody, if there is such a place
        needed = 2.0 if request.home is None and max(free) >= 2.0 * prompt else 1.0
        priced: list[Priced] = []
        for slot, free_tokens in zip(slots, free, strict=True):
            cached = cached_of.get(slot, 0) * ratio
            if cached > prompt - 1.0:
                cached = prompt - 1.0
            uncached = prompt - cached
            model = models[slot]  # the same formula as in PrefillModel.seconds
            prefill_s = model.fixed_s + uncached * (
                model.s_per_token + model.s_attention * (cached + 0.5 * uncached)
            )
            wait_s = wait[slot]
            fair_wait_s = wait_s if multiples is None else wait_s / multiples[slot]
            price = (fair_wait_s + prefill_s) * (1.0 + prefill_s * pressure)
            num_running = in_flight[slot] - unanswered[slot] + foreign[slot]
            price += decode_s * num_running * load.crowding[slot]  # the same as `room_price`
            evicted = needed * uncached - free_tokens
            if evicted > 0.0:
                price += prefill_s * (evicted / uncached if evicted < uncached else 1.0)
            priced.append((price, slot, cached, wait_s, prefill_s))
        return priced

    def _has_room(self, request: PlacementRequest, priced: Priced) -> bool:
        """Whether the backend can take the request without dropping anything."""
        free_tokens = self._state.content.free_bytes(priced[1]) * request.tokens_per_byte
        return free_tokens >= request.prompt_tokens - priced[2]

    def _candidates(self, priced: Sequence[Priced], home: int | None) -> list[Candidate]:
        """Return the best few as candidates. Building one costs as much as pricing three."""
        return [self._candidate(item, home) for item in priced[:_SHOWN]]

    def _candidate(self, priced: Priced, home: int | None) -> Candidate:
        price, slot, cached, wait_s, prefill_s = priced
        return Candidate(
            backend_id=self._state.candidates.backend_id(slot),
            price=price,
            reason="home" if slot == home else "content" if cached else "least_work",
            expected_cached_tokens=self._state.candidates.in_blocks(slot, cached),
            wait_s=wait_s,
            prefill_s=prefill_s,
        )

    def _multiples(self, request: PlacementRequest) -> Mapping[int, float] | None:
        """Return how many times the work of a plain backend each should get; None: all the same.

        Weights are shares of sessions, so a slow backend of the same weight gets as many, and its seconds
        count less. Without weights the seconds themselves are to be equal.
        """
        shares = request.shares
        if shares is None or not request.is_weighted:
            return shares
        models, fleet_scale = self._state.costs.models, self._state.costs.fleet_scale
        return {slot: share * models[slot].scale / fleet_scale for slot, share in shares.items()}

    def _open_slots(
        self, request: PlacementRequest, multiples: Mapping[int, float] | None, *, is_cached: bool
    ) -> tuple[int, ...]:
        """Return the slots that may take a new session: near the mean recent work, within the load bound.

        A backend that would stay below half of its share even with this session takes it before all others.
        While there is little work that is not so for what is no session, nor where nothing is cached and all
        backends weigh alike: then the ring alone decides, on every replica alike.
        """
        settings, load = self._state.settings, self._state.load
        facts, slots = request.facts, request.slots
        if facts.obeys_load_bound or facts.session_key is None:
            slots = self._within_load_bound(request)
            if facts.is_follow_up:
                return slots  # not new: a conversation under way, named by its text alone
        if multiples is None:
            work = [load.recent[slot] for slot in slots]
            mean = sum(work) / len(work)
        else:
            work = [load.recent[slot] / multiples[slot] for slot in slots]
            mean = sum(map(load.recent.__getitem__, slots)) / sum(map(multiples.__getitem__, slots))
        has_ring = facts.session_key is None or not (is_cached or request.is_weighted)
        if has_ring and max(work) <= load.stored(self._floor_s(), request.now_s):
            return slots
        if min(work) < _STARVED * mean:
            starved = self._starved(request, slots, work, _STARVED * mean)
            if starved:
                return starved
        limit = settings.placement_bound * mean
        if max(work) <= limit:
            return slots
        return tuple([slot for slot, done in zip(slots, work, strict=True) if done <= limit]) or slots

    def _floor_s(self) -> float:
        return self._state.settings.placement_floor * self._state.settings.recent_work_window_s

    def _starved(
        self, request: PlacementRequest, slots: tuple[int, ...], work: list[float], least: float
    ) -> tuple[int, ...]:
        """Return the slots whose recent work stays below `least` with the whole prompt added."""
        models, second = self._state.costs.models, self._state.load.stored(1.0, request.now_s)
        prompt = request.prompt_tokens
        return tuple(
            slot
            for slot, done in zip(slots, work, strict=True)
            if done < least and done + second * models[slot].seconds(prompt, 0.0) <= least
        )

    def _is_within_bound(self, request: PlacementRequest, slot: int) -> bool:
        """Whether the load bound lets a request stay at its home: always, unless its key is a bucket."""
        if not request.facts.obeys_load_bound:
            return True
        if self._state.load.in_flight[slot] < self._state.settings.load_bound_floor_requests:
            return True
        return slot in self._within_load_bound(request) or slot not in request.slots

    def _within_load_bound(self, request: PlacementRequest) -> tuple[int, ...]:
        settings, in_flight, shares = self._state.settings, self._state.load.in_flight, request.shares
        slots = request.slots
        floor = settings.load_bound_floor_requests
        if max(map(in_flight.__getitem__, slots)) < floor:
            return slots
        total = sum(map(in_flight.__getitem__, slots)) + 1
        total_share = float(len(slots)) if shares is None else sum(shares[slot] for slot in slots)
        kept = []
        for slot in slots:
            share = 1.0 if shares is None else shares[slot]
            if in_flight[slot] < max(floor, math.ceil(settings.load_bound * total * share / total_share)):
                kept.append(slot)
        return tuple(kept) or slots

    def _shortlist(
        self, request: PlacementRequest, open_slots: tuple[int, ...], levels: list[Level]
    ) -> Collection[int]:
        """Return the slots worth pricing. Of those with equal content only the least wait can win."""
        if len(open_slots) <= _PRICE_ALL:
            return open_slots
        wait = self._state.load.wait
        allowed = frozenset(open_slots)
        short: dict[int, None] = {}
        for slots, _ in levels:
            least = _least_wait(slots, allowed, wait)
            if least is not None:
                short[least] = None
            if len(short) >= _PRICE_ALL:
                break
        for slot in self._ring_slots(request, allowed, self._state.settings.ring_candidates):
            short[slot] = None
        least = _least_wait(open_slots, allowed, wait)
        short[open_slots[0] if least is None else least] = None
        return short

    def _ring_slots(self, request: PlacementRequest, allowed: frozenset[int], count: int) -> list[int]:
        key = request.facts.session_key or request.facts.prompt_key
        if key is None:
            return []
        candidates = self._state.candidates
        return candidates.ring.owners(key, count, allowed, candidates.slot_of)

    def _tie(self, price: float) -> float:
        """Return how much dearer counts as equal."""
        settings = self._state.settings
        return max(settings.tie_margin_s, settings.tie_gain * price)

    def _break_ties(self, request: PlacementRequest, priced: list[Priced]) -> list[Priced]:
        """Move the ring's choice to the front if its price is about as good as the best.

        A session of a lost backend goes to one of two successors, the one that has taken in fewer. This
        spreads them nearly evenly (the power of two choices, Mitzenmacher 2001).
        """
        limit = priced[0][0] + self._tie(priced[0][0])
        ties = [item[1] for item in priced if item[0] <= limit]
        if len(ties) == 1:
            return priced
        turn, in_flight = self._state.load.turn, self._state.load.in_flight
        ring_slots = self._ring_slots(request, frozenset(ties), 2 if request.is_moved else 1)
        if ring_slots:
            winner = min(ring_slots, key=self._state.load.adopted.__getitem__)
        else:
            winner = min(ties, key=lambda slot: (in_flight[slot], turn[slot], slot))
        place = next(index for index, item in enumerate(priced) if item[1] == winner)
        return [priced[place], *priced[:place], *priced[place + 1 :]]


def _cached_of(slots: Collection[int], levels: list[Level]) -> dict[int, int]:
    """Return how many bytes each of these slots holds, without those that hold none."""
    wanted, cached_of = frozenset(slots), dict[int, int]()
    for holders, num_bytes in reversed(levels):
        cached_of.update(dict.fromkeys(wanted.intersection(holders), num_bytes))
    return cached_of


def _least_wait(slots: Iterable[int], allowed: Container[int], wait: Sequence[float]) -> int | None:
    """Return the first allowed slot of those with the least wait, or None. An idle one ends the search."""
    least, least_s = None, math.inf
    for slot in slots:
        wait_s = wait[slot]
        if wait_s < least_s and slot in allowed:
            least, least_s = slot, wait_s
            if not wait_s:
                break
    return least
