"""FlashInfer's attention over our arena, for machines where it is installed. Never run without a CUDA device.

Decisions: FlashInfer computes attention and nothing else. Our kernels write, copy and sum blocks, because
the bytes are the contract. A layer of the arena is handed over as it lies: in plain types a tile is
`[block_size][head_dim]` values without scales, so K and V of one layer are FlashInfer's "HND" pages
`(num_blocks, num_kv_heads, block_size, head_dim)` with a page stride of one block. No byte is copied.

One paged prefill wrapper serves the whole step: a decode is a query of one row there, the kernel that
FlashInfer's decode wrapper runs with tensor cores, and a mixed step stays one launch. Causal masking is
aligned at the end of the context, as ours. It refuses what it cannot view or compute: quantised KV (it
has no scale per token and head), fp32, and head sizes that it has no kernel for. Invariants: see `attention`.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from paged_kv.arena import KVArena
from paged_kv.backends.cupy_backend import CupyBackend
from paged_kv.backends.torch_backend import storage_dtype
from paged_kv.batch import AttentionBatch
from paged_kv.layout import KVDtype, KVLayout

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation asks for


def obstacle(layout: KVLayout, device: str) -> str | None:
    """Return why FlashInfer cannot serve this arena, or None. Imports nothing."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed: pip install 'homing[flashinfer]'"
    if not device.startswith("cuda"):
        return f"FlashInfer needs a CUDA device, the KV arena is on {device}"
    if layout.dtype not in (KVDtype.BFLOAT16, KVDtype.FLOAT16):
        return f"FlashInfer reads bf16 or fp16 KV, not {layout.dtype.value} as it is stored here"
    if layout.head_dim not in HEAD_DIMS:
        return f"FlashInfer has kernels for head sizes {HEAD_DIMS}, not {layout.head_dim}"
    return None


def layer_pages(arena: torch.Tensor, layout: KVLayout, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of one layer (num_blocks, num_kv_heads, block_size, head_dim), in place.

    Args:
        arena: (total_bytes,) uint8 of a plain layout.
    """
    values = arena.view(storage_dtype(layout))
    shape = (layout.num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
    strides = (layout.tiles_per_block * layout.tile_values, layout.tile_values, layout.head_dim, 1)
    first_tile = layer * layout.tiles_per_layer
    key, value = (
        values.as_strided(shape, strides, tile * layout.tile_values)
        for tile in (first_tile, first_tile + layout.num_kv_heads)
    )
    return key, value


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """The block tables of a step in FlashInfer's form: all of them behind each other."""

    block_ids: list[int]
    starts: list[int]  # of each sequence in `block_ids`, and the total at the end
    last_lens: list[int]  # tokens in each sequence's last block, 1 to block_size


def page_table(batch: AttentionBatch, sliding_window: int | None) -> PageTable:
    """Return the pages that the step can see; blocks wholly before a sliding window are left out."""
    block_ids: list[int] = []
    starts = [0]
    for index in range(len(batch.query_lens)):
        block_ids += batch.used_blocks(index)[batch.first_block(index, sliding_window) :]
        starts.append(len(block_ids))
    last_lens = [(context - 1) % batch.block_size + 1 for context in batch.context_lens]
    return PageTable(block_ids=block_ids, starts=starts, last_lens=last_lens)


class FlashInferBackend(CupyBackend):
    """AttentionBackend whose attention is FlashInfer's. Plans once per batch, for all layers."""

    def __init__(self, arena: KVArena, *, num_heads: int, scale: float, sliding_window: int | None) -> None:
        """Raise ValueError where FlashInfer cannot serve the arena."""
        if reason := obstacle(arena.layout, arena.device):
            raise ValueError(reason)
        super().__init__(arena, num_heads=num_heads, scale=scale, sliding_window=sliding_window)
        import flashinfer

        self._num_heads = num_heads
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._bytes.device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._pages = [layer_pages(self._bytes, self._layout, i) for i in range(self._layout.num_layers)]
        self._planned_batch: AttentionBatch | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """See AttentionBackend. A query of another type than the blocks is our own kernels' work."""
        if query.dtype != storage_dtype(self._layout):
            return super().attend(layer, query, key, value, batch)
        if batch is not self._planned_batch:
            self._plan(batch)
        out: torch.Tensor = self._wrapper.run(query.contiguous(), self._pages[layer])
        return out

    def _plan(self, batch: AttentionBatch) -> None:
        window, layout = self._sliding_window, self._layout
        pages = page_table(batch, window)
        self._wrapper.plan(
            torch.tensor(batch.query_starts, dtype=torch.int32),
            torch.tensor(pages.starts, dtype=torch.int32),
            torch.tensor(pages.block_ids, dtype=torch.int32, device=self._bytes.device),
            torch.tensor(pages.last_lens, dtype=torch.int32),
            self._num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            causal=True,
            sm_scale=self._scale,
            window_left=-1 if window is None else window - 1,
            q_data_type=storage_dtype(layout),
            kv_data_type=storage_dtype(layout),
        )
        self._planned_batch = batch
