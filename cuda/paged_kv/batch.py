"""The ragged batch of one engine step, as plain lists: exactly what attention needs.

Sequence i contributes `query_lens[i]` new tokens, the last of its `context_lens[i]` tokens:

    position  0 ........ context-query | context-query ........ context-1
              already in its blocks      new in this step, written by write_kv before attend

Tokens of all sequences are concatenated in the order of the lists. Invariant: each block table covers its
context. Tensors derived from a batch (gather indices, masks) belong to the backend, which keeps them while
the same batch object is passed, so they are built once per step and shared by all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBatch:
    """One step's sequences; compared by identity, so that backends can keep what they derive from it."""

    query_lens: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    block_size: int
    slot_mapping: npt.NDArray[np.int64] = field(repr=False)  # (num_tokens,): block_id * block_size + offset

    @classmethod
    def build(
        cls,
        *,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
    ) -> "AttentionBatch":
        """Check the lists for consistency and compute the slot of every new token."""
        if not len(query_lens) == len(context_lens) == len(block_tables):
            raise ValueError("query_lens, context_lens and block_tables differ in length")
        slots = [np.empty(0, np.int64)]
        for index, (query, context, table) in enumerate(
            zip(query_lens, context_lens, block_tables, strict=True)
        ):
            if not 1 <= query <= context:
                raise ValueError(f"sequence {index}: {query} new tokens in a context of {context}")
            if len(table) * block_size < context:
                raise ValueError(f"sequence {index}: {len(table)} blocks do not hold {context} tokens")
            positions = np.arange(context - query, context)
            slots.append(
                np.asarray(table, np.int64)[positions // block_size] * block_size + positions % block_size
            )
        return cls(
            query_lens=list(query_lens),
            context_lens=list(context_lens),
            block_tables=[list(table) for table in block_tables],
            block_size=block_size,
            slot_mapping=np.concatenate(slots),
        )

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return len(self.slot_mapping)

    @property
    def query_starts(self) -> list[int]:
        """Index of each sequence's first new token, and the total at the end."""
        starts = [0]
        for query in self.query_lens:
            starts.append(starts[-1] + query)
        return starts

    def first_block(self, index: int, sliding_window: int | None) -> int:
        """Return the first entry of a block table that the sequence's oldest new token can see."""
        if sliding_window is None:
            return 0
        oldest_query = self.context_lens[index] - self.query_lens[index]
        return max(0, oldest_query + 1 - sliding_window) // self.block_size

    def used_blocks(self, index: int) -> list[int]:
        """Return the blocks of a sequence that hold context; a table may have spare ones after them."""
        return self.block_tables[index][: -(-self.context_lens[index] // self.block_size)]
