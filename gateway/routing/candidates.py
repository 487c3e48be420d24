"""The backends that a request may go to: slots, models, states, slow start.

A backend keeps one slot (a small integer) while it is in the fleet. For each model the usable backends are
kept in tiers, built once per view. A lower tier is used only when all tiers above it are empty.

    tier 0   ready, weight above 0            takes new sessions
    tier 1   degraded, weight above 0         on trial: the router gives it a few new sessions
    tier 2   cordoned, draining or weight 0   for bound sessions only, so that they can finish

Invariant: tiers hold routable backends only. It knows no load and reads no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.errors import ModelNotFound, NoBackend, shown
from gateway.routing.ring import Ring
from gateway.routing.settings import RoutingSettings
from gateway.values import Backend, BackendId, BackendState, FleetView

_MAX_MODELS = 512  # model names come from clients
_SLOW_START_STEPS = 128  # shares grow in steps, so that they are not computed for every request

ALL_TIERS = 3
OPEN_TIERS = 2
"""Tiers for new sessions. A backend that an operator has closed gets none, even if it is the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBackends:
    """The usable backends for one model, as slots; tiers are disjoint, in order of configuration ids."""

    tiers: tuple[tuple[int, ...], ...]
    best: frozenset[int]  # the first tier that is not empty
    last_joined_s: float  # when the newest of tier 0 became ready
    weights: dict[int, float] | None  # effective weights after all slow starts; None: all 1
    context_tokens: (
        dict[int, int] | None
    )  # longest prompt with its answer, of those that tell; None: all alike

    def fits(self, slot: int, num_tokens: float) -> bool:
        """Whether a prompt with its answer is short enough for a backend; where that is not told, it is."""
        lengths = self.context_tokens
        return lengths is None or lengths.get(slot, num_tokens) >= num_tokens

    def best_tier(self, excluded: frozenset[int], num_tiers: int = ALL_TIERS) -> tuple[int, ...]:
        """Return what is left of the first tier that is not wholly excluded, or nothing."""
        for tier in self.tiers[:num_tiers]:
            left = tuple(slot for slot in tier if slot not in excluded) if excluded else tier
            if left:
                return left
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewChange:
    """What a new view has changed, as slots."""

    joined: tuple[int, ...] = ()  # new to the fleet
    removed: tuple[int, ...] = ()
    emptied: tuple[int, ...] = ()  # a new epoch: its cache is cold
    admitted: tuple[int, ...] = ()  # takes new sessions now, and did not before, or is cold


class _Shares:
    """Effective weights of some slots during one step of a slow start."""

    __slots__ = ("of_slot", "slots", "warming")

    def __init__(self, slots: tuple[int, ...], of_slot: dict[int, float]) -> None:
        self.slots = slots  # kept, so that its identity is no other's
        self.of_slot = of_slot
        self.warming: dict[int, float] | None = None  # see `Candidates.warming`; None: not asked for yet


class Candidates:
    """The fleet as last observed: slots, ring, and usable backends by model."""

    def __init__(self, settings: RoutingSettings) -> None:
        self._settings = settings
        self.slot_of: dict[BackendId, int] = {}
        self.backends: list[Backend | None] = []
        self.weights: list[float] = []
        self._block_tokens: list[int] = []
        self.ring = Ring({}, settings.virtual_nodes)
        self._ring_weights: dict[BackendId, float] = {}
        self._by_model: dict[str | None, ModelBackends] = {}
        self._free: list[int] = []
        self._slow_start_step_s = settings.slow_start_s / _SLOW_START_STEPS
        self._shares: dict[tuple[int, ...] | int, _Shares] = {}  # those of one step
        self._shares_at_s = math.nan  # when this step began

    def __repr__(self) -> str:
        num_ready = sum(b is not None and b.state is BackendState.READY for b in self.backends)
        return f"<Candidates {num_ready} ready of {len(self.slot_of)}, {self.ring!r}>"

    def reconfigure(self, settings: RoutingSettings) -> None:
        """Use these settings from now on. The ring stays."""
        self._settings = settings

    def update(self, view: FleetView) -> ViewChange:
        """Take over a new view. Rebuilds the ring only if ids or weights have changed."""
        present = {b.backend_id: b for b in view.backends.values() if b.state is not BackendState.REMOVED}
        removed = [self._leave(backend_id) for backend_id in list(self.slot_of) if backend_id not in present]
        joined, emptied, admitted = [], [], []
        for backend_id in sorted(present):
            backend = present[backend_id]
            slot = self.slot_of.get(backend_id)
            before = None if slot is None else self.backends[slot]
            if slot is None:
                slot = self._join(backend_id)
                joined.append(slot)
            elif before is not None and before.epoch != backend.epoch:
                emptied.append(slot)
            was_open = before is not None and before.state.takes_new_sessions
            if backend.state.takes_new_sessions and (not was_open or slot in emptied):
                admitted.append(slot)
            self.backends[slot] = backend
            self.weights[slot] = backend.weight
            self._block_tokens[slot] = max(1, backend.kv_block_tokens)
        self._by_model = {}
        self._shares.clear()
        ring_weights = {backend_id: backend.weight for backend_id, backend in present.items()}
        if ring_weights != self._ring_weights:
            self.ring = Ring(ring_weights, self._settings.virtual_nodes)
            self._ring_weights = ring_weights
        return ViewChange(
            joined=tuple(joined), removed=tuple(removed), emptied=tuple(emptied), admitted=tuple(admitted)
        )

    def open_slots(self) -> list[int]:
        """Return the slots whose backends take new sessions."""
        view = {slot: self.backends[slot] for slot in self.slot_of.values()}
        return [slot for slot, backend in view.items() if backend and backend.state.takes_new_sessions]

    def slots_of(self, backend_ids: frozenset[BackendId]) -> frozenset[int]:
        """Return the slots of those that are still in the fleet."""
        return frozenset(self.slot_of[backend_id] for backend_id in backend_ids if backend_id in self.slot_of)

    def _join(self, backend_id: BackendId) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self.backends)
            self.backends.append(None)
            self.weights.append(0.0)
            self._block_tokens.append(1)
        self.slot_of[backend_id] = slot
        return slot

    def _leave(self, backend_id: BackendId) -> int:
        slot = self.slot_of.pop(backend_id)
        self.backends[slot] = None
        self.weights[slot] = 0.0
        self._free.append(slot)
        return slot

    def backend_id(self, slot: int) -> BackendId:
        backend = self.backends[slot]
        assert backend is not None
        return backend.backend_id

    def in_blocks(self, slot: int, tokens: float) -> int:
        """Return the part of a cached prefix that fills whole blocks of the engine: what it can report."""
        return int(tokens) - int(tokens) % self._block_tokens[slot]

    def serves(self, slot: int, model: str | None) -> bool:
        backend = self.backends[slot]
        if backend is None:
            return False
        return model is None or backend.models is None or model in backend.models

    def knows(self, model: str | None) -> bool:
        """Whether a backend of the fleet, fit or not, serves the model."""
        return any(self.serves(slot, model) for slot in self.slot_of.values())

    def for_model(self, model: str | None) -> ModelBackends:
        """Return the usable backends for a model. Raises NoBackend (empty fleet) or ModelNotFound."""
        usable = self._by_model.get(model)
        if usable is not None:
            return usable
        serving = [slot for _, slot in sorted(self.slot_of.items()) if self.serves(slot, model)]
        if not self.slot_of:
            raise NoBackend("no backend is configured", retry_after_s=self._settings.retry_after_s)
        if not serving:
            raise ModelNotFound(f"no backend serves the model {shown(model or '')!r}", param="model")
        usable = self._sort_into_tiers(serving, model)
        if len(self._by_model) < _MAX_MODELS:
            self._by_model[model] = usable
        return usable

    def _sort_into_tiers(self, serving: list[int], model: str | None) -> ModelBackends:
        tiers: tuple[list[int], list[int], list[int]] = ([], [], [])
        last_joined_s = float("-inf")
        for slot in serving:
            backend = self.backends[slot]
            assert backend is not None
            if not backend.state.is_routable:
                continue
            if backend.weight > 0 and backend.state is BackendState.READY:
                tiers[0].append(slot)
                last_joined_s = max(last_joined_s, backend.since_s)
            elif backend.weight > 0 and backend.state is BackendState.DEGRADED:
                tiers[1].append(slot)
            else:
                tiers[2].append(slot)
        weights = {slot: self.weights[slot] or 1.0 for slot in serving}
        lengths = self._context_tokens(serving, model)
        return ModelBackends(
            tiers=tuple(tuple(tier) for tier in tiers),
            best=frozenset(next(filter(None, tiers), ())),
            last_joined_s=last_joined_s,
            weights=None if all(weight == 1.0 for weight in weights.values()) else weights,
            context_tokens=None if len(lengths) == len(serving) and len({*lengths.values()}) < 2 else lengths,
        )

    def _context_tokens(self, serving: list[int], model: str | None) -> dict[int, int]:
        lengths = {}
        for slot in serving:
            backend = self.backends[slot]
            length = backend.context_tokens.get(model) if backend is not None and model is not None else None
            if length is not None:
                lengths[slot] = length
        return lengths

    def warming(self, usable: ModelBackends, now_s: float) -> dict[int, float]:
        """Return what part of all shares each backend in its slow start has."""
        open_slots, slow_s = usable.tiers[0], self._settings.slow_start_s
        if not open_slots or slow_s <= 0.0 or now_s - usable.last_joined_s >= slow_s:
            return {}
        shares = self._slow_start_shares(open_slots, usable, now_s)
        if shares.warming is None:
            total_share, weights = sum(shares.of_slot.values()), self.weights
            shares.warming = {
                slot: share / total_share
                for slot, share in shares.of_slot.items()
                if share < 0.999 * (weights[slot] or 1.0)
            }
        return shares.warming

    def share(self, slot: int, usable: ModelBackends, now_s: float) -> float:
        """Return the effective weight of one slot among those that take new sessions; 1 for any other."""
        if usable.weights is None and now_s - usable.last_joined_s >= self._settings.slow_start_s:
            return 1.0
        shares = self.shares(usable.tiers[0], usable, now_s) if usable.tiers[0] else None
        return 1.0 if shares is None else shares.get(slot, 1.0)

    def shares(self, slots: tuple[int, ...], usable: ModelBackends, now_s: float) -> dict[int, float] | None:
        """Return the effective weight of each slot, or None if all are 1.

        During its slow start a backend's weight grows linearly. It is taken relative to the backend that is
        furthest along, so that a fleet that starts as a whole is not slowed.
        """
        slow_s = self._settings.slow_start_s
        if slow_s <= 0.0 or now_s - usable.last_joined_s >= slow_s:
            return usable.weights
        return self._slow_start_shares(slots, usable, now_s).of_slot

    def _slow_start_shares(self, slots: tuple[int, ...], usable: ModelBackends, now_s: float) -> _Shares:
        """Return the shares of this step. They are computed once per step and set of slots."""
        step_s = now_s - now_s % self._slow_start_step_s
        if step_s != self._shares_at_s:
            self._shares.clear()
            self._shares_at_s = step_s
        # a whole tier is found by its identity, since the hash of a tuple looks at all of it
        key = id(slots) if slots is usable.tiers[0] else slots
        found = self._shares.get(key)
        if found is None:
            found = self._shares[key] = _Shares(slots, self._warmth(slots, step_s))
        return found

    def _warmth(self, slots: tuple[int, ...], now_s: float) -> dict[int, float]:
        slow_s, floor = self._settings.slow_start_s, self._settings.slow_start_floor
        warmth = {}
        for slot in slots:
            backend = self.backends[slot]
            assert backend is not None
            warmth[slot] = min(1.0, max(floor, (now_s - backend.since_s) / slow_s))
        most = max(warmth.values())
        return {slot: (self.weights[slot] or 1.0) * value / most for slot, value in warmth.items()}
