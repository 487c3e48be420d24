"""Our kernels as functions of tensors: grid shapes, argument order and workspaces.

One object serves one arena. It does not know where its launcher runs the kernels (on a GPU or, in tests, on
the CPU). All tensors are on the arena's device; the launcher keeps the order of the stream, so nothing here
waits.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from paged_kv.kernels.launcher import Launcher
from paged_kv.kernels.source import KernelSource, heads_per_block, kernel_source
from paged_kv.layout import KVDtype, KVLayout

NUM_THREADS = 128  # of every kernel that works on rows
VALUES_PER_LANE = 8
BYTE_MOVER_THREADS = 256
_QUERY_DTYPES = {
    torch.float32: KVDtype.FLOAT32,
    torch.bfloat16: KVDtype.BFLOAT16,
    torch.float16: KVDtype.FLOAT16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPolicy:
    """When to split one context among several thread blocks: only if the device would otherwise be idle."""

    num_processors: int
    min_split_tokens: int = 256  # below, merging costs more than idle processors
    max_splits: int = 64
    blocks_per_processor: int = 4  # limited by registers and shared memory, see the compile table

    def num_splits(self, *, num_blocks: int, max_context_len: int) -> int:
        """Return the number of splits, given the number of thread blocks without splitting."""
        wanted = math.ceil(self.num_processors * self.blocks_per_processor / num_blocks)
        useful = max_context_len // self.min_split_tokens
        return max(1, min(wanted, useful, self.max_splits))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """Single tokens to attend: one row each. All tensors int32."""

    token_rows: torch.Tensor  # (rows,): the token's place in the step's query
    block_tables: torch.Tensor  # (rows, table_width)
    context_lens: torch.Tensor  # (rows,): tokens visible, the row's own included
    max_context_len: int


def _rows_per_block(head_dim: int) -> int:
    lanes = 1 << max(0, math.ceil(math.log2(head_dim / VALUES_PER_LANE)))
    return NUM_THREADS // lanes


def with_aligned_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return (num_tokens, heads, head_dim) with tokens packed and 16-byte aligned, copied if necessary."""
    packed = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
    return tensor if packed and aligned else tensor.contiguous()


class PagedKernels:
    """The kernels over one arena (total_bytes,) uint8."""

    def __init__(
        self,
        launcher: Launcher,
        arena: torch.Tensor,
        layout: KVLayout,
        *,
        num_heads: int,
        splits: SplitPolicy,
    ) -> None:
        self._launcher = launcher
        self._arena = arena
        self._layout = layout
        self._num_heads = num_heads
        self._heads = heads_per_block(num_heads, layout.num_kv_heads)
        self._splits = splits
        self._rows_per_block = _rows_per_block(layout.head_dim)

    def write_kv(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store (num_tokens, num_kv_heads, head_dim) at int64 slots. Changes: the arena. See write_kv.cu."""
        key, value = with_aligned_rows(key), with_aligned_rows(value)
        num_rows = key.shape[0] * key.shape[1]
        self._launcher.launch(
            self._source(key.dtype),
            "write_kv",
            (math.ceil(num_rows / self._rows_per_block), 2, 1),
            NUM_THREADS,
            (
                self._arena,
                key,
                value,
                slot_mapping,
                np.int32(key.shape[0]),
                *self._layer_arguments(layer),
                np.int64(key.stride(0)),
                np.int64(value.stride(0)),
            ),
        )

    def gather_kv(
        self, layer: int, block_table: torch.Tensor, num_kv_tokens: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return (2, num_kv_heads, num_kv_tokens, head_dim) of a sequence, dequantised. See gather_kv.cu."""
        layout = self._layout
        shape = (2, layout.num_kv_heads, num_kv_tokens, layout.head_dim)
        out = torch.empty(shape, dtype=dtype, device=self._arena.device)
        self._launcher.launch(
            self._source(dtype),
            "gather_kv",
            (math.ceil(num_kv_tokens / self._rows_per_block), layout.num_kv_heads, 2),
            NUM_THREADS,
            (out, self._arena, block_table, np.int32(num_kv_tokens), *self._layer_arguments(layer)),
        )
        return out

    def decode(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        rows: DecodeRows,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        """Attend `rows`; query and out are (num_tokens, num_heads, head_dim). Changes: their rows of out."""
        query = with_aligned_rows(query)
        num_rows, table_width = rows.block_tables.shape
        num_splits = self._splits.num_splits(
            num_blocks=num_rows * self._num_heads // self._heads, max_context_len=rows.max_context_len
        )
        parts = (num_rows, self._num_heads, num_splits)
        workspace = parts if num_splits > 1 else (0, 0, 0)
        mixed = torch.empty(*workspace, self._layout.head_dim, device=query.device)
        stats = torch.empty(*workspace, 2, device=query.device)
        self._launcher.launch(
            self._source(query.dtype),
            "paged_decode",
            (num_splits, self._num_heads // self._heads, num_rows),
            NUM_THREADS,
            (
                out,
                mixed,
                stats,
                query,
                self._arena,
                rows.token_rows,
                rows.block_tables,
                rows.context_lens,
                np.int32(table_width),
                *self._layer_arguments(layer),
                np.int32(sliding_window or 0),
                np.float32(scale * math.log2(math.e)),
                np.int64(query.stride(0)),
            ),
        )
        if num_splits > 1:
            self._merge_splits(out, mixed, stats, rows)

    def _merge_splits(
        self, out: torch.Tensor, mixed: torch.Tensor, stats: torch.Tensor, rows: DecodeRows
    ) -> None:
        num_rows, num_heads, num_splits, head_dim = mixed.shape
        self._launcher.launch(
            self._source(out.dtype),
            "merge_splits",
            (num_heads, num_rows, 1),
            math.ceil(head_dim / 32) * 32,
            (out, mixed, stats, rows.token_rows, np.int32(num_splits)),
        )

    def copy_ranges(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        target_offsets: torch.Tensor,
        source_offsets: torch.Tensor,
        range_bytes: int,
    ) -> None:
        """Copy ranges between byte tensors, offsets (ranges,) int64. Changes: target. See copy_ranges.cu."""
        if len(target_offsets) == 0:
            return
        num_vectors = range_bytes // 16
        parts = min(32, math.ceil(num_vectors / BYTE_MOVER_THREADS))
        self._launcher.launch(
            self._byte_mover_source(),
            "copy_ranges",
            (parts, len(target_offsets), 1),
            BYTE_MOVER_THREADS,
            (target, source, target_offsets, source_offsets, np.int64(range_bytes)),
        )

    def checksums(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Return reference.checksum of blocks (blocks,) int64, as int64 bits. See checksum.cu."""
        sums = torch.zeros(len(block_ids), dtype=torch.int64, device=self._arena.device)
        block_bytes = self._layout.block_bytes
        parts = min(32, math.ceil(block_bytes / 8 / BYTE_MOVER_THREADS))
        self._launcher.launch(
            self._byte_mover_source(),
            "checksum_blocks",
            (parts, len(block_ids), 1),
            BYTE_MOVER_THREADS,
            (sums, self._arena, block_ids, np.int64(block_bytes)),
        )
        return sums

    def _source(self, query_dtype: torch.dtype) -> KernelSource:
        return kernel_source(self._layout, query_dtype=_QUERY_DTYPES[query_dtype], heads=self._heads)

    def _byte_mover_source(self) -> KernelSource:
        """Return the variant that is most likely compiled already: all move bytes alike."""
        dtype = KVDtype.BFLOAT16 if self._layout.dtype.is_quantised else self._layout.dtype
        return kernel_source(self._layout, query_dtype=dtype, heads=self._heads)

    def _layer_arguments(self, layer: int) -> tuple[np.int32, np.int32, np.int32]:
        """Return num_kv_heads, tiles_per_block and layer_tile, in the kernels' order."""
        layout = self._layout
        return (
            np.int32(layout.num_kv_heads),
            np.int32(layout.tiles_per_block),
            np.int32(layer * layout.tiles_per_layer),
        )
