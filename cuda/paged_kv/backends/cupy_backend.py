"""Paged attention with our own CUDA kernels.

Decisions: a sequence with at most MAX_DECODE_TOKENS new tokens (a decode, the end of a prompt) is attended
by the decode kernel, one row per token, straight from its blocks. Longer ones are gathered once and passed
to torch's SDPA, whose tensor-core kernels no plain kernel can match. The launcher decides where the kernels
run; tests pass one that runs the same files on the CPU. Invariants: see `attention`.
"""

from dataclasses import dataclass

import torch

from paged_kv.arena import KVArena, check_rows
from paged_kv.backends.torch_backend import attend_prefill, storage_dtype
from paged_kv.backends.torch_plan import Prefill, plan_prefill
from paged_kv.batch import AttentionBatch
from paged_kv.kernels.device import DeviceLauncher
from paged_kv.kernels.launcher import Launcher
from paged_kv.kernels.paged_ops import DecodeRows, PagedKernels, SplitPolicy

MAX_DECODE_TOKENS = 4  # above, reading the context once per token costs more than gathering it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What the layers of one step share."""

    slot_mapping: torch.Tensor  # (num_tokens,) int64
    decode_rows: DecodeRows | None
    prefills: list[tuple[Prefill, torch.Tensor]]  # with the block table from the first visible block, int32


class CupyBackend:
    """AttentionBackend over our kernels. Keeps what it derived from the latest batch."""

    def __init__(
        self,
        arena: KVArena,
        *,
        num_heads: int,
        scale: float,
        sliding_window: int | None,
        launcher: Launcher | None = None,
        splits: SplitPolicy | None = None,
    ) -> None:
        """Compile nothing yet: that happens at the first launch.

        Args:
            launcher: runs the kernels; None: on the arena's CUDA device.

        Raises:
            ValueError: no launcher for an arena in host memory.
        """
        if launcher is None and arena.is_host:
            raise ValueError("the cupy backend needs a CUDA device: choose torch, or --device cuda:0")
        self._arena = arena
        self._layout = arena.layout
        self._scale = scale
        self._sliding_window = sliding_window
        self._bytes = arena.tensor()
        num_processors = 1
        if launcher is None:
            launcher = DeviceLauncher(self._bytes.device)
            num_processors = launcher.num_processors
        self.kernels = PagedKernels(
            launcher,
            self._bytes,
            arena.layout,
            num_heads=num_heads,
            splits=splits or SplitPolicy(num_processors=num_processors),
        )
        self._derived: tuple[AttentionBatch, torch.dtype, _Step] | None = None

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> None:
        """See AttentionBackend."""
        self.kernels.write_kv(layer, key, value, self._step(batch, key.dtype).slot_mapping)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """See AttentionBackend."""
        step = self._step(batch, query.dtype)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if step.decode_rows is not None:
            self.kernels.decode(
                layer, query, out, step.decode_rows, scale=self._scale, sliding_window=self._sliding_window
            )
        for prefill, block_table in step.prefills:
            rows = slice(prefill.start, prefill.stop)
            if prefill.is_fresh and query.dtype == storage_dtype(self._layout):
                keys, values = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
            else:
                keys, values = self.kernels.gather_kv(layer, block_table, prefill.num_kv_tokens, query.dtype)
            out[rows] = attend_prefill(query[rows], keys, values, prefill.mask, scale=self._scale)
        return out

    def _step(self, batch: AttentionBatch, dtype: torch.dtype) -> _Step:
        derived = self._derived
        if derived is None or derived[0] is not batch or derived[1] != dtype:
            self._derived = derived = (batch, dtype, self._derive(batch, dtype))
        return derived[2]

    def _derive(self, batch: AttentionBatch, dtype: torch.dtype) -> _Step:
        device = self._bytes.device
        decoding = [index for index, query in enumerate(batch.query_lens) if query <= MAX_DECODE_TOKENS]
        prefills = []
        for index, query in enumerate(batch.query_lens):
            if query > MAX_DECODE_TOKENS:
                prefill = plan_prefill(
                    batch, self._layout, index, window=self._sliding_window, dtype=dtype, device=device
                )
                first = batch.first_block(index, self._sliding_window)
                table = torch.tensor(batch.used_blocks(index)[first:], dtype=torch.int32)
                prefills.append((prefill, table.to(device)))
        return _Step(
            slot_mapping=torch.from_numpy(batch.slot_mapping).to(device),
            decode_rows=_decode_rows(batch, decoding, device) if decoding else None,
            prefills=prefills,
        )

    def read_blocks(self, block_ids: list[int], out: torch.Tensor) -> None:
        """See AttentionBackend. Gathers on the device; the copy engine then transfers to the host."""
        check_rows(self._layout, block_ids, out)
        scratch, rows, blocks = self._transfer_places(block_ids)
        self.kernels.copy_ranges(scratch, self._bytes, rows, blocks, self._layout.block_bytes)
        out.copy_(scratch, non_blocking=True)

    def write_blocks(self, block_ids: list[int], data: torch.Tensor) -> None:
        """See AttentionBackend."""
        check_rows(self._layout, block_ids, data)
        scratch, rows, blocks = self._transfer_places(block_ids)
        scratch.copy_(data, non_blocking=True)
        self.kernels.copy_ranges(self._bytes, scratch, blocks, rows, self._layout.block_bytes)

    def _transfer_places(self, block_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scratch rows for the blocks, their offsets in it, and the blocks' offsets in the arena."""
        device, block_bytes = self._bytes.device, self._layout.block_bytes
        scratch = torch.empty(len(block_ids), block_bytes, dtype=torch.uint8, device=device)
        rows = torch.arange(len(block_ids), device=device) * block_bytes
        return scratch, rows, torch.tensor(block_ids, dtype=torch.int64).to(device) * block_bytes

    def read_block(self, block_id: int) -> bytes:
        """See AttentionBackend."""
        return self._arena.read_block(block_id)

    def write_block(self, block_id: int, data: bytes) -> None:
        """See AttentionBackend."""
        self._arena.write_block(block_id, data)

    def checksum(self, block_id: int) -> int:
        """See AttentionBackend."""
        sums = self.kernels.checksums(torch.tensor([block_id], device=self._bytes.device))
        return int(sums.item()) % (1 << 64)


def _decode_rows(batch: AttentionBatch, indices: list[int], device: torch.device) -> DecodeRows:
    """Return one row per new token of the given sequences."""
    starts = batch.query_starts
    token_rows: list[int] = []
    lengths: list[int] = []
    tables: list[list[int]] = []
    for index in indices:
        query, table = batch.query_lens[index], batch.used_blocks(index)
        token_rows += range(starts[index], starts[index] + query)
        lengths += range(batch.context_lens[index] - query + 1, batch.context_lens[index] + 1)
        tables += [table] * query
    width = max(len(table) for table in tables)
    # The padding is never read: each row is read up to its own length.
    padded = [table + [0] * (width - len(table)) for table in tables]

    def on_device(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    return DecodeRows(
        token_rows=on_device(token_rows),
        block_tables=on_device(padded),
        context_lens=on_device(lengths),
        max_context_len=max(lengths),
    )
