"""Guess the next tokens from the text so far: what followed the same few tokens last time follows again.

Chats quote, code repeats names, summaries copy sentences; then several tokens come out of one step. The
guesses cost nothing but a slightly wider step and never change the text: the runner keeps a guess only if
the sampler chooses it. Method: prompt lookup decoding (Saxena, 2023). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_NGRAM = 3
MIN_NGRAM = 2  # one token alone repeats by chance: its guesses are mostly wrong


def propose_drafts(token_ids: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    """Return up to `num_drafts` tokens that followed the latest earlier copy of the text's last n-gram.

    O(len(token_ids) × MAX_NGRAM) at worst: one backward scan per n-gram length, longest first.
    """
    for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        if len(token_ids) <= size:
            continue
        tail = list(token_ids[-size:])
        for start in range(len(token_ids) - size - 1, -1, -1):
            if token_ids[start + size - 1] == tail[-1] and list(token_ids[start : start + size]) == tail:
                return tuple(token_ids[start + size : start + size + num_drafts])
    return ()
