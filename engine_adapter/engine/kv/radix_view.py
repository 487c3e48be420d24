"""The prefix cache as a readable tree: chains without branches become one node.

A node has its number of blocks, how many sequences and pins hold its last block, and what continues it. The
number of nodes is bounded, largest subtrees first: nobody can read a cache of a million tokens. Read-only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.prefix_cache import CachedBlock, PrefixCache
from paged_kv.block_pool import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class RadixNode:
    """A run of blocks that all its continuations share."""

    first_hash: str  # hex, of the first block: a stable name for the node
    num_blocks: int
    num_holders: int  # sequences that hold its last block now
    num_pins: int
    num_blocks_below: int  # in all continuations
    children: tuple[RadixNode, ...]
    num_children_left_off: int = 0


def radix_view(cache: PrefixCache, pool: BlockPool, max_nodes: int = 200) -> list[RadixNode]:
    """Return the roots of the tree, one per first block, largest first. O(blocks)."""
    budget = [max_nodes]
    sizes = _subtree_sizes(cache)
    roots = [entry for entry in cache if cache.parent_of(entry) is None]
    nodes, _ = _nodes(cache, pool, roots, sizes, budget)
    return nodes


def _subtree_sizes(cache: PrefixCache) -> dict[BlockHash, int]:
    """Blocks in the subtree of each block, itself included. Iterative: chains may be thousands long."""
    sizes: dict[BlockHash, int] = {}
    stack = [entry for entry in cache if cache.parent_of(entry) is None]
    order: list[CachedBlock] = []
    while stack:
        entry = stack.pop()
        order.append(entry)
        stack.extend(cache.children_of(entry.block_hash))
    for entry in reversed(order):
        children = cache.children_of(entry.block_hash)
        sizes[entry.block_hash] = 1 + sum(sizes[child.block_hash] for child in children)
    return sizes


def _nodes(
    cache: PrefixCache,
    pool: BlockPool,
    entries: Iterable[CachedBlock],
    sizes: dict[BlockHash, int],
    budget: list[int],
) -> tuple[list[RadixNode], int]:
    """Make the nodes of these blocks while the budget lasts; return them and how many were left out."""
    ordered = sorted(entries, key=lambda entry: sizes[entry.block_hash], reverse=True)
    taken = ordered[: max(budget[0], 0)]
    budget[0] -= len(taken)
    nodes = []
    for entry in taken:
        last, num_blocks = entry, 1
        children = cache.children_of(last.block_hash)
        while len(children) == 1:
            last, num_blocks = children[0], num_blocks + 1
            children = cache.children_of(last.block_hash)
        below, left_off = _nodes(cache, pool, children, sizes, budget)
        nodes.append(
            RadixNode(
                first_hash=entry.block_hash.hex(),
                num_blocks=num_blocks,
                num_holders=pool.ref_cnt(last.block_id),
                num_pins=pool.pin_cnt(last.block_id),
                num_blocks_below=sizes[entry.block_hash] - num_blocks,
                children=tuple(below),
                num_children_left_off=left_off,
            )
        )
    return nodes, len(ordered) - len(taken)
