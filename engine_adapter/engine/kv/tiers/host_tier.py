"""The host tier: blocks in ordinary memory, bounded, least recently used chain tail first.

One allocation, touched only as it fills. A chain is useless without its head, so whoever uses a block uses
its ancestors too, and the head always ends up as the most recent: eviction eats chains from their tail. A
chain longer than the tier keeps its head and refuses the rest. Only the engine's thread calls it. It knows
no device: rows come and go as bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.tiers.tier_block import Row, TierBlock
from paged_kv.arena import allocate_host_bytes


@dataclass(slots=True, kw_only=True)
class _Place:
    block: TierBlock
    slot: int
    used_at: int  # number of the use that touched it last


class HostTier:
    """Hash → row of one arena."""

    def __init__(self, *, max_bytes: int, block_bytes: int) -> None:
        self.num_slots = max_bytes // block_bytes
        if self.num_slots < 1:
            raise ValueError(f"a host tier of {max_bytes} bytes holds no KV block: one takes {block_bytes}")
        self.num_evictions = 0
        self._rows = allocate_host_bytes(self.num_slots * block_bytes).reshape(self.num_slots, block_bytes)
        self._places: OrderedDict[BlockHash, _Place] = OrderedDict()  # least recently used first
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._places)

    def get(self, block_hash: BlockHash) -> TierBlock | None:
        place = self._places.get(block_hash)
        return None if place is None else place.block

    def row(self, block_hash: BlockHash) -> Row | None:
        """Return a block's bytes in place; valid until the next `put`."""
        place = self._places.get(block_hash)
        return None if place is None else self._rows[place.slot]

    def put(self, chain: list[TierBlock], rows: Row) -> int:
        """Keep blocks that follow each other in one chain, and their bytes (blocks, block_bytes).

        Returns how many leading ones are kept now: fewer where the chain alone fills the tier.
        Changes: evicts; touches the chain up to its head.
        """
        if chain[0].depth and chain[0].parent_hash not in self._places:
            return 0
        self._num_uses += 1
        self._touch(chain[0].parent_hash)
        num_kept = 0
        for block, row in zip(chain, rows, strict=True):
            place = self._places.get(block.block_hash)
            if place is None:
                slot = self._take_slot()
                if slot is None:
                    break
                self._rows[slot] = row
                place = _Place(block=block, slot=slot, used_at=self._num_uses)
                self._places[block.block_hash] = place
            place.used_at = self._num_uses
            num_kept += 1
        if num_kept:
            self._touch(chain[num_kept - 1].block_hash)
        return num_kept

    def use(self, block_hash: BlockHash) -> None:
        """Take note that a block was found, and so everything before it."""
        self._num_uses += 1
        self._touch(block_hash)

    def discard(self, block_hash: BlockHash) -> None:
        """Forget a block whose bytes are not what they were."""
        place = self._places.pop(block_hash, None)
        if place is not None:
            self._free_slots.append(place.slot)

    def clear(self) -> int:
        """Forget everything; returns how many blocks that were."""
        num_blocks = len(self._places)
        for block_hash in list(self._places):
            self.discard(block_hash)
        return num_blocks

    def _touch(self, block_hash: BlockHash) -> None:
        """Move a chain to the recent end, head last. O(depth)."""
        while (place := self._places.get(block_hash)) is not None:
            place.used_at = self._num_uses
            self._places.move_to_end(block_hash)
            block_hash = place.block.parent_hash

    def _take_slot(self) -> int | None:
        """Return a free slot, evicting if need be; None if all that is left belongs to the present chain."""
        if not self._free_slots:
            block_hash, place = next(iter(self._places.items()))
            if place.used_at == self._num_uses:
                return None
            self.discard(block_hash)
            self.num_evictions += 1
        return self._free_slots.pop()
