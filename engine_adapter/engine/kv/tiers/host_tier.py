"""The host tier: a bounded number of blocks in ordinary memory, least recently used evicted first.

One allocation, touched only as it fills. A chain is useless without its head, so using a block also counts as
using its ancestors, and the head becomes the most recent: eviction removes chains from their end. Of a chain
longer than the tier, the head is kept and the rest refused. Only the engine's thread calls it. It does not
know the device: rows come and go as bytes.
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
            raise ValueError(
                f"a host tier of {max_bytes} bytes cannot hold a KV block of {block_bytes} bytes"
            )
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
        """Store consecutive blocks of one chain, and their bytes (blocks, block_bytes).

        Returns how many leading ones are stored: fewer if the chain alone fills the tier.
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
        """Count a use of a block and its ancestors."""
        self._num_uses += 1
        self._touch(block_hash)

    def discard(self, block_hash: BlockHash) -> None:
        """Forget a block whose bytes are damaged."""
        place = self._places.pop(block_hash, None)
        if place is not None:
            self._free_slots.append(place.slot)

    def clear(self) -> int:
        """Forget everything; return the number of blocks."""
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
        """Return a free slot, evicting if necessary; None if all other blocks belong to the current chain."""
        if not self._free_slots:
            block_hash, place = next(iter(self._places.items()))
            if place.used_at == self._num_uses:
                return None
            self.discard(block_hash)
            self.num_evictions += 1
        return self._free_slots.pop()
