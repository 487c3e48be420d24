"""Debug mode: blocks that nobody owns are poisoned, blocks that must not change carry a canary.

Two rules of paged memory cannot be seen from a block table: a free block is written by nobody, and a full
block that others may share never changes. The guard makes both visible where they are broken, whoever broke
them (a late store, a wrong slot, a recycled block): it fills a freed block with NaN, so that a reader gets
NaN and not a stranger's text, and remembers a checksum of each sealed block. Costs a fill per free and a
checksum per seal and check, so it is for tests and for hunting, not for serving.
"""

from typing import Protocol

POISON_BYTE = 0xFF  # as fp8, bf16, fp16, fp32 and as a scale: NaN


class GuardedMemory(Protocol):
    """What the guard needs of a backend, or of several behind one set of block ids."""

    def write_block(self, block_id: int, data: bytes) -> None:
        """Changes: one block."""

    def checksum(self, block_id: int) -> int:
        """Return a sum of one block's bytes."""


class BlockCorrupted(Exception):
    """A block does not hold what it must."""


class BlockGuard:
    """Watches the blocks of one backend. A block is poisoned, sealed, or open (anything may be written)."""

    def __init__(self, memory: GuardedMemory, *, num_blocks: int, block_bytes: int) -> None:
        self._memory = memory
        self._poison = bytes([POISON_BYTE]) * block_bytes
        self._poisoned: set[int] = set()
        self._sealed: dict[int, int] = {}
        for block_id in range(num_blocks):
            self.freed(block_id)
        self._poison_checksum = memory.checksum(0)

    def freed(self, block_id: int) -> None:
        """Changes: the block's bytes. Call when a block's content has become worthless."""
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
            raise BlockCorrupted(f"block {block_id} is sealed although nobody took it")
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
