"""What the torch backend computes from a batch once per step: gather indices, masks, tail rows.

A batch is split into two kinds of work, so that nothing is padded to more than twice its size:

- decode groups: sequences with one new token, padded to the longest of the group; a group has sequences
  whose block counts round up to the same power of two;
- prefills: each sequence with several new tokens separately, unpadded.

Where the compiled kernels can run, they process all sequences with one new token together and each of the
others separately; they need no padding, no gather indices and no masks.

Tile rows are for layer 0; a layer adds `layer * tiles_per_layer`. Invariant: `tail_rows` lists every row of a
decode group at or past a sequence's end, so that the backend can zero what it gathered there: a weight of
zero does not cancel a NaN.
"""

from dataclasses import dataclass

import torch

from paged_kv.batch import AttentionBatch
from paged_kv.cpu.cpu_attention import CPUAttention, CPUDecodePlan, CPUPrefillPlan
from paged_kv.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Sequences with one new token each, attended together. KV axis 0 below is (K, V)."""

    token_rows: torch.Tensor  # (batch,) int64: rows of the step's query
    num_sequences: int
    num_kv_tokens: int  # padded length S
    tile_rows: torch.Tensor  # (2 * batch * num_kv_heads * blocks,) int64
    mask: torch.Tensor | None  # (batch, 1, 1, S) additive, None when no sequence is padded
    tail_rows: torch.Tensor | None  # rows of the gathered (2 * batch * num_kv_heads * S, head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One sequence with several new tokens: query rows start..stop-1."""

    start: int
    stop: int
    is_fresh: bool  # no earlier context: all keys and values are those of the new tokens
    num_kv_tokens: int  # from the first block gathered to the end of the context
    tile_rows: torch.Tensor  # (2 * num_kv_heads * blocks,) int64
    mask: torch.Tensor | None  # (query, num_kv_tokens) additive; None means causal, aligned at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything the layers of one step share."""

    first_tiles: torch.Tensor  # (num_tokens,) int64: K tile of each new token's first head in layer 0
    write_tiles: torch.Tensor  # (num_tokens, num_kv_heads) int64: of every head
    write_offsets: torch.Tensor  # (num_tokens, 1) int64: row inside the tile
    decode_groups: list[DecodeGroup]
    native_decode: CPUDecodePlan | None  # instead of groups
    prefills: list[Prefill]
    native_prefills: list[tuple[slice, CPUPrefillPlan]]  # instead of prefills: rows of the step's query


def _tile_rows(layout: KVLayout, tables: list[list[int]]) -> torch.Tensor:
    """Return tile ids ordered (K/V, sequence, head, block) for equally long tables."""
    first_tile = torch.tensor(tables, dtype=torch.int64) * layout.tiles_per_block
    kind = torch.arange(2).view(2, 1, 1, 1) * layout.num_kv_heads
    head = torch.arange(layout.num_kv_heads).view(1, 1, -1, 1)
    return (first_tile[None, :, None, :] + kind + head).reshape(-1)


def _plan_decode_group(
    batch: AttentionBatch,
    layout: KVLayout,
    members: list[int],
    *,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeGroup:
    starts = batch.query_starts
    tables, lengths, hidden = [], [], []
    for index in members:
        skipped = batch.first_block(index, window)
        tables.append(batch.used_blocks(index)[skipped:])
        lengths.append(batch.context_lens[index] - skipped * layout.block_size)
        # The window may begin inside the first gathered block.
        hidden.append(0 if window is None else max(0, lengths[-1] - window))
    num_blocks = max(len(table) for table in tables)
    tables = [table + table[:1] * (num_blocks - len(table)) for table in tables]
    num_kv_tokens = max(lengths) if len(set(lengths)) == 1 else num_blocks * layout.block_size
    mask = tail_rows = None
    position = torch.arange(num_kv_tokens)[None]
    is_beyond = position >= torch.tensor(lengths)[:, None]
    is_invisible = is_beyond | (position < torch.tensor(hidden)[:, None])
    if is_invisible.any():
        mask = torch.zeros(len(members), 1, 1, num_kv_tokens, dtype=dtype)
        mask = mask.masked_fill_(is_invisible[:, None, None], float("-inf")).to(device)
    if is_beyond.any():
        shape = (2, len(members), layout.num_kv_heads, num_kv_tokens)
        tail_rows = is_beyond[None, :, None, :].expand(shape).reshape(-1).nonzero().view(-1).to(device)
    return DecodeGroup(
        token_rows=torch.tensor([starts[index] for index in members]).to(device),
        num_sequences=len(members),
        num_kv_tokens=num_kv_tokens,
        tile_rows=_tile_rows(layout, tables).to(device),
        mask=mask,
        tail_rows=tail_rows,
    )


def plan_prefill(
    batch: AttentionBatch,
    layout: KVLayout,
    index: int,
    *,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Prefill:
    """Plan one sequence with several new tokens. On a GPU, SDPA needs no mask for plain causality."""
    query, context = batch.query_lens[index], batch.context_lens[index]
    skipped = batch.first_block(index, window)
    num_kv_tokens = context - skipped * layout.block_size
    mask = None
    has_window = window is not None and window < context
    if has_window or (query != context and device.type == "cpu"):
        key_position = torch.arange(num_kv_tokens)[None]
        query_position = torch.arange(num_kv_tokens - query, num_kv_tokens)[:, None]
        invisible = key_position > query_position
        if window is not None:
            invisible |= key_position <= query_position - window
        mask = (
            torch.zeros(query, num_kv_tokens, dtype=dtype).masked_fill_(invisible, float("-inf")).to(device)
        )
    return Prefill(
        start=batch.query_starts[index],
        stop=batch.query_starts[index] + query,
        is_fresh=query == context,
        num_kv_tokens=num_kv_tokens,
        tile_rows=_tile_rows(layout, [batch.used_blocks(index)[skipped:]]).to(device),
        mask=mask,
    )


def plan_step(
    batch: AttentionBatch,
    layout: KVLayout,
    *,
    sliding_window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    native: CPUAttention | None = None,
) -> StepPlan:
    """Plan a step for queries of `dtype`, with all tensors on `device`."""
    groups: dict[int, list[int]] = {}
    decodes = [index for index, query in enumerate(batch.query_lens) if query == 1] if native else []
    prefills: list[Prefill] = []
    native_prefills: list[tuple[slice, CPUPrefillPlan]] = []
    starts = batch.query_starts
    for index, query in enumerate(batch.query_lens):
        if query == 1 and native is not None:
            continue
        if query == 1:
            num_blocks = len(batch.used_blocks(index)) - batch.first_block(index, sliding_window)
            groups.setdefault(num_blocks.bit_length(), []).append(index)
        elif native is not None and native.serves_prefill:
            rows = slice(starts[index], starts[index + 1])
            native_prefills.append((rows, native.plan_prefill(batch, index, sliding_window)))
        else:
            prefills.append(
                plan_prefill(batch, layout, index, window=sliding_window, dtype=dtype, device=device)
            )
    slots = torch.from_numpy(batch.slot_mapping)
    first_tiles = slots // layout.block_size * layout.tiles_per_block
    return StepPlan(
        first_tiles=first_tiles.to(device),
        write_tiles=(first_tiles[:, None] + torch.arange(layout.num_kv_heads)).to(device),
        write_offsets=(slots % layout.block_size)[:, None].to(device),
        decode_groups=[
            _plan_decode_group(batch, layout, members, window=sliding_window, dtype=dtype, device=device)
            for members in groups.values()
        ],
        native_decode=native.plan(batch, decodes, sliding_window) if native and decodes else None,
        prefills=prefills,
        native_prefills=native_prefills,
    )
