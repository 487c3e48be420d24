"""Debug mode: poisons free blocks and checksums blocks that must not change.

Block tables cannot show violations of two rules: a free block is never written, and a full block that may be
shared never changes. The guard detects both, whatever the cause (a late store, a wrong slot, a recycled
block): it fills a freed block with NaN, so that a reader gets NaN instead of another sequence's data, and
remembers a checksum of each sealed block. Costs a fill per free and a checksum per seal and check, so it is
for tests and debugging, not for serving.
"""

from typing import Protocol

POISON_BYTE = 0xFF  # as fp8, bf16, fp16, fp32 and as a scale: NaN


class GuardedMemory(Protocol):
    """What the guard needs from a backend, or from several that share block ids."""

    def write_block(self, block_id: int, data: bytes) -> None:
        """Write one block. Changes: its bytes."""

    def checksum(self, block_id: int) -> int:
        """Return a checksum of one block's bytes."""


class BlockCorrupted(Exception):
    """A block does not have the expected content."""


class BlockGuard:
    """Watches the blocks of one backend. A block is poisoned, sealed, or open (it may be written)."""

    def __init__(self, memory: GuardedMemory, *, num_blocks: int, block_bytes: int) -> None:
        self._memory = memory
        self._poison = bytes([POISON_BYTE]) * block_bytes
        self._poisoned: set[int] = set()
        self._sealed: dict[int, int] = {}
        for block_id in range(num_blocks):
            self.freed(block_id)
        self._poison_checksum = memory.checksum(0)

    def freed(self, block_id: int) -> None:
        """Poison a block that has become free. Changes: the block's bytes."""
        self._sealed.pop(block_id, None)
        self._memory.write_block(block_id, self._poison)
        self._poisoned.add(block_id)

    def taken(self, block_id: int) -> None:
        """Open a block for writing. Raises BlockCorrupted if it was written while it was free."""
        self.check(block_id)
        self._poisoned.discard(block_id)
        self._sealed.pop(block_id, None)

    def sealed(self, block_id: int) -> None:
        """Remember a full block's content. Raises BlockCorrupted if the block is free."""
        if block_id in self._poisoned:
            raise BlockCorrupted(f"block {block_id} was sealed while it was free")
        self._sealed[block_id] = self._memory.checksum(block_id)

    def check(self, block_id: int) -> None:
        """Raise BlockCorrupted if a free block was written or a sealed one has changed. Changes nothing."""
        if block_id in self._poisoned and self._memory.checksum(block_id) != self._poison_checksum:
            raise BlockCorrupted(f"block {block_id} was written while it was free")
        if block_id in self._sealed and self._memory.checksum(block_id) != self._sealed[block_id]:
            raise BlockCorrupted(f"block {block_id} changed after it was sealed")

    def check_all(self) -> None:
        """Check every block."""
        for block_id in [*self._poisoned, *self._sealed]:
            self.check(block_id)
