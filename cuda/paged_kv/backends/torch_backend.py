"""Paged attention in torch operations: gather whole tiles, then SDPA. Runs on a CPU and on any torch device.

Decisions, each measured on a CPU: whole tiles are gathered with one `index_select` over contiguous rows
(single tokens cost a third more at 2k context); when decoding, the query heads that share a KV head become
the query length, so KV is never repeated; where the compiled kernels can run (fp32 on a CPU, one thread),
nothing is gathered; otherwise a prompt without earlier context uses the keys and values that were passed in;
masks are additive in the query's dtype and built once per step. Invariants: see `attention`.
"""

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from paged_kv import reference
from paged_kv.arena import KVArena, check_rows
from paged_kv.backends.torch_plan import DecodeGroup, Prefill, StepPlan, plan_step
from paged_kv.batch import AttentionBatch
from paged_kv.codec import MAX_STORED_SCALE, MIN_STORED_SCALE, SCALE_UNIT
from paged_kv.cpu.cpu_attention import CPUAttention
from paged_kv.layout import SCALE_BYTES, KVDtype, KVLayout

_STORED = {
    KVDtype.FLOAT32: torch.float32,
    KVDtype.BFLOAT16: torch.bfloat16,
    KVDtype.FLOAT16: torch.float16,
    KVDtype.FP8_E4M3: torch.float8_e4m3fn,
    KVDtype.INT8: torch.int8,
}


def quantise_rows(rows: torch.Tensor, dtype: KVDtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stored bytes (uint8) and scales (fp16) of rows (..., head_dim), as `codec.encode_rows` does."""
    rows = rows.float()
    magnitude = torch.where(rows.isfinite(), rows, 0.0).abs()
    # A tensor is divided by; torch replaces a Python number by its reciprocal, which rounds differently.
    limit = torch.full((), dtype.max_magnitude, device=rows.device)
    scales = (magnitude.amax(-1) / limit / float(SCALE_UNIT)).clamp(
        float(MIN_STORED_SCALE), float(MAX_STORED_SCALE)
    )
    scales = scales.to(torch.float16)
    clean = rows.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    scaled = (clean / (scales.float() * float(SCALE_UNIT))[..., None]).clamp(-limit, limit)
    if dtype is KVDtype.INT8:
        scaled = scaled.round()
    return scaled.to(_STORED[dtype]).view(torch.uint8), scales


def fp8_to_float(stored: torch.Tensor) -> torch.Tensor:
    """Decode E4M3 bytes (uint8) to float32, times 2**-8, the unit of stored scales.

    An fp8 code is an fp16 number with one exponent bit and seven fraction bits fewer: shifted into place it
    is exactly the value times 2**(7 - 15), subnormals included. On a CPU this takes 0.67 ns per value,
    torch's own conversion 6.05. The two NaN codes would read as 480; rows never contain them, and a poisoned
    row's scale is NaN.
    """
    bits = stored.view(torch.int8).to(torch.int16)
    bits <<= 7
    bits &= ~0x4000  # sign extension has copied the sign into the highest exponent bit
    return bits.view(torch.float16).to(torch.float32)


def attend_prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, *, scale: float
) -> torch.Tensor:
    """Attend query (num_tokens, num_heads, head_dim) over keys and values (kv_heads, kv_tokens, head_dim).

    Without a mask, attention is causal and the last query is aligned with the last key.
    """
    num_tokens, num_kv_tokens = query.shape[0], keys.shape[1]
    is_square = num_tokens == num_kv_tokens
    if mask is None and not is_square:
        # Only on a GPU. The import loads torch's compiler: 2 s and 100 MB that a CPU worker does not need.
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(num_tokens, num_kv_tokens)
    out: torch.Tensor = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None and is_square,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[0],
    )
    return out[0].transpose(0, 1)


def _has_packed_heads(rows: torch.Tensor) -> bool:
    return rows.stride()[1:] == (rows.shape[2], 1)


def _suits_native(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and torch.get_num_threads() == 1


def storage_dtype(layout: KVLayout) -> torch.dtype:
    """Return the torch type of a layout's stored values."""
    return _STORED[layout.dtype]


class TorchBackend:
    """AttentionBackend in torch. Keeps the plan of the latest batch."""

    def __init__(self, arena: KVArena, *, num_heads: int, scale: float, sliding_window: int | None) -> None:
        layout = arena.layout
        self._layout = layout
        self._arena = arena
        self._scale = scale
        self._sliding_window = sliding_window
        self._group = num_heads // layout.num_kv_heads
        self._bytes = arena.tensor()
        self._blocks = self._bytes.view(layout.num_blocks, layout.block_bytes)
        tiles = self._bytes.view(layout.num_tiles, layout.tile_bytes)
        self._stored_dtype = _STORED[layout.dtype]
        self._tiles = tiles if layout.dtype.is_quantised else tiles.view(self._stored_dtype)
        self._rows = tiles[:, : layout.tile_data_bytes].view(-1, layout.block_size, self._row_bytes())
        if not layout.dtype.is_quantised:
            self._rows = self._rows.view(self._stored_dtype)
        scales_end = layout.tile_data_bytes + layout.block_size * SCALE_BYTES
        self._scale_bytes = slice(layout.tile_data_bytes, scales_end)
        self._native: CPUAttention | None = None
        if CPUAttention.serves(layout, self._bytes.device):
            self._native = CPUAttention(self._tiles, layout, group=self._group, scale=scale)
        self._planned: tuple[AttentionBatch, torch.dtype, StepPlan] | None = None

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> None:
        """See AttentionBackend."""
        plan = self._plan(batch, key)
        for is_value, rows in ((False, key), (True, value)):
            if self._native is not None and rows.dtype is torch.float32 and _has_packed_heads(rows):
                self._native.write(layer, rows, plan.first_tiles, plan.write_offsets, is_value=is_value)
                continue
            tiles = plan.write_tiles + (
                layer * self._layout.tiles_per_layer + is_value * self._layout.num_kv_heads
            )
            if self._layout.dtype.is_quantised:
                stored, scales = quantise_rows(rows, self._layout.dtype)
                self._rows[tiles, plan.write_offsets] = stored
                self._scales()[tiles, plan.write_offsets] = scales
            else:
                self._rows[tiles, plan.write_offsets] = rows.to(self._stored_dtype)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """See AttentionBackend."""
        plan = self._plan(batch, query)
        native = plan.native_decode
        if not plan.prefills and not plan.native_prefills:  # only decodes: rows are already in order
            if native is not None:
                assert self._native is not None
                return self._native.attend(layer, query, native)
            if len(plan.decode_groups) == 1:
                return self._decode(layer, query, plan.decode_groups[0])
        out = torch.empty_like(query)
        if native is not None:
            assert self._native is not None
            rows_of = native.token_rows
            out.index_copy_(0, rows_of, self._native.attend(layer, query.index_select(0, rows_of), native))
        for group in plan.decode_groups:
            out.index_copy_(
                0, group.token_rows, self._decode(layer, query.index_select(0, group.token_rows), group)
            )
        for rows, native_prefill in plan.native_prefills:
            assert self._native is not None
            out[rows] = self._native.attend_prefill(layer, query[rows], native_prefill)
        for prefill in plan.prefills:
            rows = slice(prefill.start, prefill.stop)
            out[rows] = self._prefill(layer, query[rows], key[rows], value[rows], prefill)
        return out

    def _decode(self, layer: int, query: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        """Attend one new token per sequence: query (batch, num_heads, head_dim)."""
        layout = self._layout
        gathered = self._gather(layer, group.tile_rows, query.dtype)
        shape = (2, group.num_sequences, layout.num_kv_heads, -1, layout.head_dim)
        key, value = gathered.view(shape)[:, :, :, : group.num_kv_tokens]
        if group.tail_rows is not None:
            gathered.view(-1, layout.head_dim).index_fill_(0, group.tail_rows, 0)
        folded = query.reshape(group.num_sequences, layout.num_kv_heads, self._group, layout.head_dim)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=group.mask, scale=self._scale)
        return out.reshape(query.shape)

    def _prefill(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prefill: Prefill
    ) -> torch.Tensor:
        """Attend the new tokens of one sequence: query (num_tokens, num_heads, head_dim)."""
        layout = self._layout
        if prefill.is_fresh and query.dtype == self._stored_dtype:
            keys, values = key.transpose(0, 1), value.transpose(0, 1)
        else:
            gathered = self._gather(layer, prefill.tile_rows, query.dtype)
            shape = (2, layout.num_kv_heads, -1, layout.head_dim)
            keys, values = gathered.view(shape)[:, :, : prefill.num_kv_tokens]
        return attend_prefill(query, keys, values, prefill.mask, scale=self._scale)

    def _gather(self, layer: int, tile_rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of the tiles' values (num_tiles * block_size, head_dim) in `dtype`."""
        layout = self._layout
        tiles = self._tiles.index_select(0, tile_rows + layer * layout.tiles_per_layer)
        if not layout.dtype.is_quantised:
            return tiles.to(dtype).view(-1, layout.head_dim)
        stored = tiles[:, : layout.tile_data_bytes]
        scales = tiles[:, self._scale_bytes].view(torch.float16).reshape(-1, 1).float()
        if layout.dtype is KVDtype.FP8_E4M3:
            values = fp8_to_float(stored)
        else:
            values, scales = stored.view(torch.int8).to(torch.float32), scales * float(SCALE_UNIT)
        return values.view(-1, layout.head_dim).mul_(scales).to(dtype)

    def _plan(self, batch: AttentionBatch, tensor: torch.Tensor) -> StepPlan:
        planned = self._planned
        if planned is None or planned[0] is not batch or planned[1] != tensor.dtype:
            plan = plan_step(
                batch,
                self._layout,
                sliding_window=self._sliding_window,
                dtype=tensor.dtype,
                device=self._bytes.device,
                native=self._native if _suits_native(tensor) else None,
            )
            self._planned = planned = (batch, tensor.dtype, plan)
        return planned[2]

    def _row_bytes(self) -> int:
        return self._layout.head_dim * self._layout.dtype.item_bytes

    def _scales(self) -> torch.Tensor:
        """Return (num_tiles, block_size) fp16, in place."""
        tiles = self._bytes.view(self._layout.num_tiles, self._layout.tile_bytes)
        return tiles[:, self._scale_bytes].view(torch.float16)

    def read_blocks(self, block_ids: list[int], out: torch.Tensor) -> None:
        """See AttentionBackend. One copy per block: `index_copy_` of bytes takes nine times as long."""
        check_rows(self._layout, block_ids, out)
        for row, block_id in zip(out, block_ids, strict=True):
            row.copy_(self._blocks[block_id], non_blocking=True)

    def write_blocks(self, block_ids: list[int], data: torch.Tensor) -> None:
        """See AttentionBackend. One copy per block."""
        check_rows(self._layout, block_ids, data)
        for row, block_id in zip(data, block_ids, strict=True):
            self._blocks[block_id].copy_(row, non_blocking=True)

    def read_block(self, block_id: int) -> bytes:
        """See AttentionBackend."""
        return self._arena.read_block(block_id)

    def write_block(self, block_id: int, data: bytes) -> None:
        """See AttentionBackend."""
        self._arena.write_block(block_id, data)

    def checksum(self, block_id: int) -> int:
        """See AttentionBackend."""
        return reference.checksum(np.frombuffer(self._arena.read_block(block_id), np.uint8))
