"""Counts the resident tokens of each tag. The gateway chooses the tags and needs no tokenizer and no hashes.

A request carries opaque tags. A session tag stands for the newest prompt and answer of that session. A group
tag stands for what all prompts with that tag have in common, such as a shared system prompt. A tag's resident
tokens are the cached head of its hash chain. Bounded: the least recently used tag is dropped first. Holds
hashes only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.prefix_cache import PrefixCache

DEFAULT_MAX_TAGS = 16_384


class TagInventory:
    """Tag → chain of block hashes."""

    def __init__(self, cache: PrefixCache, block_size: int, max_tags: int = DEFAULT_MAX_TAGS) -> None:
        self._cache = cache
        self._block_size = block_size
        self._max_tags = max_tags
        self._chains: OrderedDict[str, tuple[BlockHash, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chains)

    def record_session(self, tag: str, hashes: Sequence[BlockHash]) -> None:
        """Make this chain the tag's."""
        self._store(tag, tuple(hashes))

    def record_group(self, tag: str, prompt_hashes: Sequence[BlockHash]) -> None:
        """Shorten the tag's chain to what this prompt shares with all earlier ones."""
        known = self._chains.get(tag)
        if known is None:
            self._store(tag, tuple(prompt_hashes))
            return
        num_common = 0
        for mine, theirs in zip(known, prompt_hashes, strict=False):
            if mine != theirs:
                break
            num_common += 1
        # A prompt that shares nothing does not belong to the group: keep the chain.
        self._store(tag, known[:num_common] if num_common else known)

    def forget(self, tag: str) -> None:
        self._chains.pop(tag, None)

    def resident_tokens(self, tag: str) -> int | None:
        """The tag's tokens that are cached now, or None for an unknown tag."""
        chain = self._chains.get(tag)
        return None if chain is None else self._num_resident(chain) * self._block_size

    def report(self) -> dict[str, int]:
        """Resident tokens of every tag that has any. O(resident blocks of all tags)."""
        counts = {tag: self._num_resident(chain) * self._block_size for tag, chain in self._chains.items()}
        return {tag: count for tag, count in counts.items() if count}

    def report_below(
        self, count_following: Callable[[Sequence[BlockHash]], dict[str, int]]
    ) -> dict[str, dict[str, int]]:
        """Tokens of every tag that follow its resident ones and are in a tier, by tag and tier.

        Args:
            count_following: see `KVTiers.count_following`.
        """
        counts = {
            tag: count_following(chain[self._num_resident(chain) :]) for tag, chain in self._chains.items()
        }
        return {tag: by_tier for tag, by_tier in counts.items() if any(by_tier.values())}

    def _num_resident(self, chain: Sequence[BlockHash]) -> int:
        count = 0
        for block_hash in chain:
            if block_hash not in self._cache:
                break
            count += 1
        return count

    def _store(self, tag: str, chain: tuple[BlockHash, ...]) -> None:
        self._chains[tag] = chain
        self._chains.move_to_end(tag)
        if len(self._chains) > self._max_tags:
            self._chains.popitem(last=False)
