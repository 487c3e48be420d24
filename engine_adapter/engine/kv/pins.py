"""Pins: shared prefixes that stay resident, within a budget.

A pin names a prefix by its tokens and holds every full block of it. Rules:

- pinned blocks never exceed the budget (a share of all blocks), so requests can always evict something;
- a block is counted once, however many pins hold it, and stays until the last of them is removed;
- a pin gets the longest head of its prefix that fits the budget, and reports how much that is; to fit, it may
  displace whole pins of strictly lower priority; a pin that gets nothing is refused;
- what is not resident is computed by an internal request and pinned when that ends;
- a lifetime runs from creation, on the wall clock; using the prefix does not extend it.

It does not know HTTP, text or files (`pin_manifest` keeps pins over a restart).
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_adapter.engine.kv.block_hash import BlockHash, chain_hashes, encode_tokens
from engine_adapter.engine.kv.block_manager import BlockManager
from paged_kv.block_pool import BlockId


class PinRefused(Exception):
    """The pin is refused; the message says why."""


class PinState(enum.Enum):
    PENDING = "pending"  # part of the prefix has still to be computed
    PINNED = "pinned"  # every full block is held
    PARTIAL = "partial"  # only the head of the prefix is held: budget or computation ended there


@dataclass(frozen=True, slots=True, kw_only=True)
class PinSpec:
    """A prefix to keep, as requested. Serialisable as it is."""

    token_ids: tuple[int, ...]
    name: str = ""
    owner: str = ""
    priority: int = 0  # lower is more important, as for requests
    cache_salt: str = ""
    adapter: str = ""
    expires_at_wall_s: float | None = None  # None: until removed


@dataclass(slots=True, kw_only=True, eq=False)
class Pin:
    """One accepted pin and what it holds now."""

    pin_id: str
    spec: PinSpec
    namespace: BlockHash
    hashes: list[BlockHash]  # of all full blocks of the prefix
    num_allowed_blocks: int  # what the budget granted, at most len(hashes)
    state: PinState = PinState.PENDING
    block_ids: list[BlockId] = field(default_factory=list)


class PinTable:
    """All pins over one block manager. Single-threaded, like the engine."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        budget_fraction: float,
        max_prefix_tokens: int,
        wall_clock: Callable[[], float],
    ) -> None:
        self.budget_blocks = int(blocks.pool.num_blocks * budget_fraction)
        self._max_prefix_blocks = max_prefix_tokens // blocks.block_size
        self._blocks = blocks
        self._wall_clock = wall_clock
        self._pins: dict[str, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def pins(self) -> list[Pin]:
        return list(self._pins.values())

    @property
    def pinned_blocks(self) -> list[BlockId]:
        """The blocks of every pin, with repetitions: what `BlockPool.verify` compares."""
        return [block_id for pin in self._pins.values() for block_id in pin.block_ids]

    def get(self, pin_id: str) -> Pin | None:
        return self._pins.get(pin_id)

    def add(self, spec: PinSpec, namespace: BlockHash, pin_id: str | None = None) -> Pin:
        """Accept a pin and hold what is already resident.

        Raises:
            PinRefused: shorter than a block, already expired, or no budget for even its first block.

        Changes: holds blocks; may remove pins of lower priority.
        """
        hashes = chain_hashes(namespace, spec.token_ids, self._blocks.block_size)
        if not hashes:
            raise PinRefused(f"a pin needs at least one full block of {self._blocks.block_size} tokens")
        if spec.expires_at_wall_s is not None and spec.expires_at_wall_s <= self._wall_clock():
            raise PinRefused("its lifetime has already ended")
        pin = Pin(
            pin_id=pin_id or f"pin-{secrets.token_hex(8)}",
            spec=spec,
            namespace=namespace,
            hashes=hashes,
            num_allowed_blocks=0,
        )
        pin.num_allowed_blocks = self._make_budget(pin)
        self._pins[pin.pin_id] = pin
        self._hold_resident(pin)
        return pin

    def settle(self, pin: Pin) -> None:
        """Hold what has become resident, after the request for this pin has ended, successfully or not."""
        if pin.pin_id in self._pins:
            self._hold_resident(pin)
            pin.num_allowed_blocks = len(pin.block_ids)
            complete = len(pin.block_ids) == len(pin.hashes)
            pin.state = PinState.PINNED if complete else PinState.PARTIAL

    def remove(self, pin_id: str) -> Pin | None:
        """Remove a pin; its blocks become ordinary cached ones, the deepest first in eviction order."""
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            for block_id in reversed(pin.block_ids):
                self._blocks.pool.unpin(block_id)
            pin.block_ids = []
        return pin

    def expire(self) -> list[Pin]:
        """Remove and return the pins whose lifetime has ended."""
        now_s = self._wall_clock()
        expired = [
            pin
            for pin in self._pins.values()
            if pin.spec.expires_at_wall_s is not None and pin.spec.expires_at_wall_s <= now_s
        ]
        for pin in expired:
            self.remove(pin.pin_id)
        return expired

    def _hold_resident(self, pin: Pin) -> None:
        size = self._blocks.block_size
        resident = self._blocks.prefix_cache.longest_prefix(
            pin.namespace,
            pin.hashes[: pin.num_allowed_blocks],
            encode_tokens(pin.spec.token_ids[: pin.num_allowed_blocks * size]),
            self._blocks.block_bytes,
        )
        # Held blocks stay cached, so the new list starts with the old one.
        for block_id in resident[len(pin.block_ids) :]:
            self._blocks.pool.pin(block_id)
            pin.block_ids.append(block_id)
        if len(pin.block_ids) == pin.num_allowed_blocks:
            complete = len(pin.block_ids) == len(pin.hashes)
            pin.state = PinState.PINNED if complete else PinState.PARTIAL

    def _make_budget(self, pin: Pin) -> int:
        """Return how many leading blocks the pin may hold; displaces pins of lower priority if needed."""
        while (allowed := self._affordable(pin)) < min(len(pin.hashes), self._max_prefix_blocks):
            worse = [other for other in self._pins.values() if other.spec.priority > pin.spec.priority]
            if not worse:
                break
            self.remove(max(worse, key=lambda other: other.spec.priority).pin_id)
        if allowed == 0:
            raise PinRefused(f"the budget of {self.budget_blocks} pinned blocks is used up")
        return allowed

    def _affordable(self, pin: Pin) -> int:
        """Leading blocks that fit the budget; those that another pin holds or awaits are free."""
        promised = {
            block_hash
            for other in self._pins.values()
            for block_hash in other.hashes[: other.num_allowed_blocks]
        }
        room = self.budget_blocks - len(promised)
        for index, block_hash in enumerate(pin.hashes[: self._max_prefix_blocks]):
            room -= block_hash not in promised
            if room < 0:
                return index
        return min(len(pin.hashes), self._max_prefix_blocks)
