"""Chains of made-up blocks for the tests of tiers: real names, random bytes, no model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine_adapter.engine.kv.block_hash import BlockHash, block_hash, encode_tokens, root_hash
from engine_adapter.engine.kv.tiers.disk_tier import DiskTier
from engine_adapter.engine.kv.tiers.segment import SegmentShape
from engine_adapter.engine.kv.tiers.tier_block import TierBlock, payload_checksum

BLOCK_BYTES = 64
BLOCK_SIZE = 4
ROOT = root_hash({"model": "made up"})
SHAPE = SegmentShape(root=ROOT, block_bytes=BLOCK_BYTES, token_bytes=4 * BLOCK_SIZE, num_slots=3)

Rows = npt.NDArray[np.uint8]


def chain_of(seed: int, length: int, parent: TierBlock | None = None) -> tuple[list[TierBlock], Rows]:
    """Blocks that continue `parent` (None: a namespace of the seed's own) and their bytes."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (length, BLOCK_BYTES), np.uint8)
    parent_hash = root_hash({"namespace": str(seed)}) if parent is None else parent.block_hash
    depth = 0 if parent is None else parent.depth + 1
    chain = []
    for row in rows:
        tokens = encode_tokens(rng.integers(0, 1000, BLOCK_SIZE).tolist())
        block = TierBlock(
            block_hash=block_hash(parent_hash, tokens),
            parent_hash=parent_hash,
            token_bytes=tokens,
            depth=depth,
            checksum=payload_checksum(row.data),
        )
        chain.append(block)
        parent_hash, depth = block.block_hash, depth + 1
    return chain, rows


def disk_tier(folder: object, max_bytes: int = 1 << 20, root: BlockHash = ROOT) -> DiskTier:
    return DiskTier(
        folder,  # type: ignore[arg-type]  # pytest's paths
        max_bytes=max_bytes,
        block_bytes=BLOCK_BYTES,
        token_bytes=4 * BLOCK_SIZE,
        root=root,
    )


def append_all(tier: DiskTier, chain: list[TierBlock], rows: Rows) -> int:
    """Append a chain; return how many blocks were taken."""
    return sum(tier.append(block, row) for block, row in zip(chain, rows, strict=True))


def read_one(tier: DiskTier, block: TierBlock) -> bytes | None:
    """The block's bytes as a load would get them, or None."""
    place = tier.find(block.block_hash)
    if place is None or not place.block.matches(block.parent_hash, block.token_bytes):
        return None
    rows = np.empty((1, BLOCK_BYTES), np.uint8)
    return rows.tobytes() if tier.read([place], rows) else None
