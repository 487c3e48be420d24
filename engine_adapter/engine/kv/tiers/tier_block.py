"""What a tier below the device keeps of one block, and the words for tiers.

A tier names blocks as the device's prefix cache does and compares as much on a hit: name, parent and tokens.
The checksum is made once, when the bytes leave the device, and goes with them to every tier: whatever went
wrong in between is a miss when they come back. It detects accidents, not attackers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from engine_adapter.engine.kv.block_hash import BlockHash

Row = npt.NDArray[np.uint8]
"""The bytes of one block (block_bytes,), or of several (blocks, block_bytes)."""

payload_checksum: Callable[[memoryview | bytes], int] = xxhash.xxh3_64_intdigest


class Tier(enum.Enum):
    """Where KV can be kept when its device block is gone."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBlock:
    """One full block of KV outside the device; its bytes are the device's, scales included."""

    block_hash: BlockHash
    parent_hash: BlockHash
    token_bytes: bytes
    depth: int  # blocks before it in its chain; 0 follows the namespace itself
    checksum: int  # of the bytes

    def matches(self, parent_hash: BlockHash, token_bytes: bytes) -> bool:
        """Return whether this is that content, not only its name: a forced collision is a miss."""
        return self.parent_hash == parent_hash and self.token_bytes == token_bytes
