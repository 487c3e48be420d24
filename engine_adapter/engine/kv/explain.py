"""Explains why a prompt would hit or miss the cache now.

Walks the hash chain of the prompt and finds the first block that is not cached, and the reason: it was
evicted, cached prompts differ from token n on, the same tokens are cached under another salt or adapter, or
nobody has sent them. The answer reveals what others have sent, so it is for operators only. Changes nothing;
a hit is not counted.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine_adapter.engine.kv.block_hash import BlockHash, chain_hashes, encode_tokens, num_common_tokens
from engine_adapter.engine.kv.block_manager import BlockManager
from engine_adapter.engine.kv.prefix_cache import CachedBlock


class MissCause(enum.Enum):
    NONE = "none"  # everything that can be reused is cached
    TOO_SHORT = "too_short"  # shorter than one full block and a token
    EVICTED = "evicted"
    DIFFERENT = "different"  # a cached prompt shares this prefix and differs inside the block
    OTHER_NAMESPACE = "other_namespace"  # the same tokens are cached under another salt or adapter
    NEVER_SEEN = "never_seen"  # or so long ago that its eviction is no longer remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How much of a prompt is cached, and why not more."""

    num_tokens: int
    num_cached_tokens: int
    num_reusable_tokens: int  # if everything were cached: full blocks, never the last token
    cause: MissCause
    first_missing_token: int | None = None  # position where the cached prefix ends, or where prompts differ
    evicted_at_s: float | None = None  # on the engine's clock
    tier_tokens: dict[str, int] = field(default_factory=dict)  # after the cached ones, in each tier


def explain_prompt(
    blocks: BlockManager,
    namespace: BlockHash,
    token_ids: Sequence[int],
    other_namespaces: Iterable[BlockHash] = (),
) -> Explanation:
    """Explain one prompt against the cache as it is now."""
    size = blocks.block_size
    num_reusable = max(len(token_ids) - 1, 0) // size
    head = token_ids[: num_reusable * size]
    hashes = chain_hashes(namespace, head, size)
    num_cached = _num_cached(blocks, namespace, hashes, head)
    explanation = functools.partial(
        Explanation,
        num_tokens=len(token_ids),
        num_cached_tokens=num_cached * size,
        num_reusable_tokens=num_reusable * size,
    )
    if num_cached == num_reusable:
        return explanation(cause=MissCause.NONE if num_reusable else MissCause.TOO_SHORT)
    position = num_cached * size
    evicted_at_s = blocks.eviction_log.evicted_at_s(hashes[num_cached])
    if evicted_at_s is not None:
        return explanation(cause=MissCause.EVICTED, first_missing_token=position, evicted_at_s=evicted_at_s)
    for other in other_namespaces:
        if (
            other != namespace
            and _num_cached(blocks, other, chain_hashes(other, head, size), head) > num_cached
        ):
            return explanation(cause=MissCause.OTHER_NAMESPACE, first_missing_token=position)
    parent = hashes[num_cached - 1] if num_cached else namespace
    missing = token_ids[position : position + size]
    shared = _longest_shared(blocks.prefix_cache.children_of(parent), missing)
    if shared is None:
        return explanation(cause=MissCause.NEVER_SEEN, first_missing_token=position)
    return explanation(cause=MissCause.DIFFERENT, first_missing_token=position + shared)


def _num_cached(
    blocks: BlockManager, namespace: BlockHash, hashes: Sequence[BlockHash], token_ids: Sequence[int]
) -> int:
    found = blocks.prefix_cache.longest_prefix(
        namespace, hashes, encode_tokens(token_ids), blocks.block_bytes
    )
    return len(found)


def _longest_shared(children: Iterable[CachedBlock], token_ids: Sequence[int]) -> int | None:
    """Tokens that the best cached continuation shares, or None if there is no continuation."""
    encoded = encode_tokens(token_ids)
    return max((num_common_tokens(child.token_bytes, encoded) for child in children), default=None)
