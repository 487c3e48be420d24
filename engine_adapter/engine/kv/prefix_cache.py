"""Index from block hashes to blocks: which prefix of a prompt is already in KV memory.

Entries form a tree: each has its parent's hash, so a lookup walks down from the namespace and stops at the
first gap. A hit needs the same hash, tokens *and* parent, so even a forced hash collision is a (counted)
miss and never returns another prompt's KV. A hash has one block: a second copy of the same content is
refused, and the caller uses the first.

The index keeps no eviction order and counts no holders (the block pool does), and never touches KV memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine_adapter.engine.kv.block_hash import BlockHash
from paged_kv.block_pool import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBlock:
    """One full block of KV in the index."""

    block_hash: BlockHash
    parent_hash: BlockHash
    token_bytes: bytes
    block_id: BlockId


class PrefixCache:
    """Hash → block, block → hash, and parent → children."""

    def __init__(self) -> None:
        self.num_collisions = 0
        self._by_hash: dict[BlockHash, CachedBlock] = {}
        self._by_block: dict[BlockId, CachedBlock] = {}
        self._children: dict[BlockHash, dict[BlockHash, None]] = {}

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self)} blocks, {self.num_collisions} collisions>"

    def __len__(self) -> int:
        return len(self._by_hash)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._by_hash

    def get(self, block_hash: BlockHash, parent_hash: BlockHash, token_bytes: bytes) -> CachedBlock | None:
        """Return the entry with this hash, parent and tokens, else None."""
        entry = self._by_hash.get(block_hash)
        if entry is None:
            return None
        if entry.token_bytes != token_bytes or entry.parent_hash != parent_hash:
            self.num_collisions += 1
            return None
        return entry

    def longest_prefix(
        self, namespace: BlockHash, hashes: Sequence[BlockHash], encoded_tokens: bytes, block_bytes: int
    ) -> list[BlockId]:
        """Return the blocks of the longest cached prefix, first block first. O(length of the match).

        Args:
            hashes: of the prompt's full blocks, or of as many as may be reused.
            encoded_tokens: the prompt as `encode_tokens` returns it, at least `len(hashes)` blocks long.
            block_bytes: encoded size of one block.
        """
        found: list[BlockId] = []
        parent = namespace
        for index, block_hash in enumerate(hashes):
            entry = self.get(
                block_hash, parent, encoded_tokens[index * block_bytes : (index + 1) * block_bytes]
            )
            if entry is None:
                break
            found.append(entry.block_id)
            parent = block_hash
        return found

    def insert(self, entry: CachedBlock) -> BlockId | None:
        """Add a computed block.

        Returns:
            The block that now serves this content: the entry's own, or an earlier twin, which the caller
            should use instead. None if the hash belongs to other content (a collision): then the block
            stays private to its sequence.
        """
        assert entry.block_id not in self._by_block, f"block {entry.block_id} is already indexed"
        if entry.block_hash in self._by_hash:
            twin = self.get(entry.block_hash, entry.parent_hash, entry.token_bytes)
            return None if twin is None else twin.block_id
        self._by_hash[entry.block_hash] = entry
        self._by_block[entry.block_id] = entry
        self._children.setdefault(entry.parent_hash, {})[entry.block_hash] = None
        return entry.block_id

    def remove(self, block_id: BlockId) -> CachedBlock | None:
        """Remove a block whose memory is about to be reused. Returns its entry, or None if not indexed."""
        entry = self._by_block.pop(block_id, None)
        if entry is None:
            return None
        del self._by_hash[entry.block_hash]
        siblings = self._children[entry.parent_hash]
        del siblings[entry.block_hash]
        if not siblings:
            del self._children[entry.parent_hash]
        return entry

    def entry_of(self, block_id: BlockId) -> CachedBlock | None:
        return self._by_block.get(block_id)

    def parent_of(self, entry: CachedBlock) -> CachedBlock | None:
        return self._by_hash.get(entry.parent_hash)

    def children_of(self, parent_hash: BlockHash) -> list[CachedBlock]:
        """Entries that continue the given prefix: the branches of the tree at this point."""
        return [self._by_hash[child] for child in self._children.get(parent_hash, ())]

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._by_hash.values())

    def verify(self) -> None:
        """Assert that the three maps agree. O(n)."""
        assert len(self._by_hash) == len(self._by_block)
        assert sum(len(children) for children in self._children.values()) == len(self._by_hash)
        for block_hash, entry in self._by_hash.items():
            assert entry.block_hash == block_hash
            assert self._by_block[entry.block_id] is entry
            assert block_hash in self._children[entry.parent_hash]
