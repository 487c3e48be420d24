"""One block as a tier stores it, and the names of the tiers.

A tier identifies blocks as the prefix cache does, and compares the same on a hit: hash, parent and tokens.
The checksum is computed once, when the bytes leave the device, and goes with them to every tier: if anything
went wrong in between, the block is a miss when it comes back. It detects accidents, not attackers.
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
    """Where KV can be stored outside the device."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBlock:
    """One full block of KV outside the device; the bytes are the device's, scales included."""

    block_hash: BlockHash
    parent_hash: BlockHash
    token_bytes: bytes
    depth: int  # blocks before it in its chain; 0 for the first block of a prompt
    checksum: int  # of the bytes

    def matches(self, parent_hash: BlockHash, token_bytes: bytes) -> bool:
        """Return whether the content is the same, not only the hash: a forced collision is a miss."""
        return self.parent_hash == parent_hash and self.token_bytes == token_bytes
