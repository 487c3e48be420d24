"""The index: longest prefix, collisions, twins, and agreement with a plain dictionary of token tuples."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.engine.kv import block_hash as naming
from engine_adapter.engine.kv.block_hash import (
    BlockHash,
    chain_hashes,
    encode_tokens,
    namespace_hash,
    root_hash,
)
from engine_adapter.engine.kv.prefix_cache import CachedBlock, PrefixCache
from paged_kv.block_pool import BlockId

SIZE = 2
BLOCK_BYTES = SIZE * 4
NAMESPACE = namespace_hash(root_hash({"model": "m"}))


def entry(parent: BlockHash, tokens: list[int], block_id: int, name: bytes | None = None) -> CachedBlock:
    encoded = encode_tokens(tokens)
    return CachedBlock(
        block_hash=BlockHash(name) if name else naming.block_hash(parent, encoded),
        parent_hash=parent,
        token_bytes=encoded,
        block_id=BlockId(block_id),
    )


def lookup(cache: PrefixCache, tokens: list[int]) -> list[BlockId]:
    hashes = chain_hashes(NAMESPACE, tokens, SIZE)
    return cache.longest_prefix(NAMESPACE, hashes, encode_tokens(tokens), BLOCK_BYTES)


def test_longest_prefix_stops_at_the_first_gap() -> None:
    """Without the middle block, the blocks after it are unreachable."""
    cache = PrefixCache()
    parent = NAMESPACE
    for index in range(3):
        block = entry(parent, [index, index], index)
        cache.insert(block)
        parent = block.block_hash
    assert lookup(cache, [0, 0, 1, 1, 2, 2]) == [0, 1, 2]
    cache.remove(BlockId(1))
    assert lookup(cache, [0, 0, 1, 1, 2, 2]) == [0]


def test_a_twin_is_refused_in_favour_of_the_first() -> None:
    """The same content computed twice is indexed once; the caller learns which block serves it."""
    cache = PrefixCache()
    assert cache.insert(entry(NAMESPACE, [1, 2], 0)) == 0
    assert cache.insert(entry(NAMESPACE, [1, 2], 5)) == 0
    assert len(cache) == 1
    assert cache.remove(BlockId(5)) is None


def test_a_forced_collision_is_a_counted_miss() -> None:
    """Equal names with other tokens never serve each other's KV."""
    cache = PrefixCache()
    name = hashlib.sha256(b"same").digest()
    cache.insert(entry(NAMESPACE, [1, 2], 0, name))
    assert cache.get(BlockHash(name), NAMESPACE, encode_tokens([3, 4])) is None
    assert cache.get(BlockHash(name), BlockHash(b"other parent"), encode_tokens([1, 2])) is None
    assert cache.num_collisions == 2
    assert cache.insert(entry(NAMESPACE, [3, 4], 1, name)) is None
    assert cache.get(BlockHash(name), NAMESPACE, encode_tokens([1, 2])) is not None


def test_indexing_a_block_twice_is_a_bug() -> None:
    """One block cannot hold two contents."""
    cache = PrefixCache()
    cache.insert(entry(NAMESPACE, [1, 2], 0))
    with pytest.raises(AssertionError):
        cache.insert(entry(NAMESPACE, [3, 4], 0))


def test_children_are_the_branches_of_a_prefix() -> None:
    """Two continuations of one prefix are both listed under it."""
    cache = PrefixCache()
    stem = entry(NAMESPACE, [1, 1], 0)
    cache.insert(stem)
    for index in (1, 2):
        cache.insert(entry(stem.block_hash, [index, index], index))
    assert [child.block_id for child in cache.children_of(stem.block_hash)] == [1, 2]
    assert cache.parent_of(cache.children_of(stem.block_hash)[0]) == stem


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=8), max_size=12), st.data())
def test_lookup_agrees_with_a_dictionary_of_token_tuples(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    """Insertions and removals of many small-alphabet prompts: every lookup equals the naive one."""
    cache, naive = PrefixCache(), {}
    next_id = 0
    for tokens in prompts:
        parent = NAMESPACE
        for start in range(0, len(tokens) // SIZE * SIZE, SIZE):
            block = entry(parent, tokens[start : start + SIZE], next_id)
            parent = block.block_hash
            key = tuple(tokens[: start + SIZE])
            if cache.insert(block) == next_id:
                naive[key] = next_id
                next_id += 1
        if data.draw(st.booleans()) and naive:
            key = data.draw(st.sampled_from(sorted(naive)))
            cache.remove(BlockId(naive.pop(key)))
        cache.verify()
        for other in prompts:
            found = []
            for end in range(SIZE, len(other) + 1, SIZE):
                if tuple(other[:end]) not in naive:
                    break
                found.append(naive[tuple(other[:end])])
            assert lookup(cache, other) == found
