"""Compiled attention and KV writes for fp32 KV on a host, as functions of tensors (see the .c file).

Decides where it can run: one torch thread, fp32 KV and queries, a head size that is a multiple of the vector
length (for prompts, of twice that). It attends sequences with one new token together, and others one by one.
All layers share its plan of a step.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paged_kv.batch import AttentionBatch
from paged_kv.cpu.native import native_library
from paged_kv.layout import KVDtype, KVLayout

SOURCE = Path(__file__).with_suffix(".c")
LANES = 8  # as in the source
GROUP = 4
PANEL = 16
BLOCK_ROWS = 24
_pointer, _long = ctypes.c_void_p, ctypes.c_long


class _Shape(ctypes.Structure):
    _fields_ = [
        ("num_kv_heads", _long),
        ("group", _long),
        ("head_dim", _long),
        ("block_size", _long),
        ("tiles_per_block", _long),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUDecodePlan:
    """Sequences with one new token each."""

    token_rows: torch.Tensor  # (sequences,) int64: rows of the step's query
    blocks: torch.Tensor  # (sequences, columns) int64
    visible: torch.Tensor  # (2, sequences) int64: first visible position, and one past the last
    scores: torch.Tensor  # scratch: GROUP rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUPrefillPlan:
    """One sequence with several new tokens."""

    blocks: torch.Tensor  # (blocks,) int64
    num_context_tokens: int
    window: int  # positions that each token sees, at most
    scratch: torch.Tensor


class CPUAttention:
    """The loaded kernels over one arena, given as its tiles `(num_tiles, values)` fp32."""

    def __init__(self, tiles: torch.Tensor, layout: KVLayout, *, group: int, scale: float) -> None:
        library = native_library(SOURCE)
        assert library is not None, "check `serves` first"
        self._function = library.homing_paged_decode
        self._function.restype = None
        self._function.argtypes = [
            *(_pointer, _long, _pointer, _pointer, _long, _pointer, _pointer, _pointer, _pointer, _long),
            _pointer,
        ]
        self._prefill = library.homing_paged_prefill
        self._prefill.restype = None
        self._prefill.argtypes = [
            *(_pointer, _long, _long, _pointer, _pointer, _long, _long, _pointer, _pointer, _pointer),
        ]
        self._write = library.homing_write_rows
        self._write.restype = None
        self._write.argtypes = [_pointer, _long, _long, _pointer, _pointer, _pointer, _pointer]
        self._tiles = tiles  # keeps the memory alive: the addresses below point into it
        self._first_tiles = [
            tuple(
                tiles.data_ptr()
                + layout.tile_id(block_id=0, layer=layer, is_value=is_value, head=0) * layout.tile_bytes
                for is_value in (False, True)
            )
            for layer in range(layout.num_layers)
        ]
        self.serves_prefill = layout.head_dim % PANEL == 0
        self._shape = _Shape(
            layout.num_kv_heads, group, layout.head_dim, layout.block_size, layout.tiles_per_block, scale
        )

    @staticmethod
    def serves(layout: KVLayout, device: torch.device) -> bool:
        """Whether the kernels support this arena on this machine."""
        is_plain = layout.dtype is KVDtype.FLOAT32 and layout.head_dim % LANES == 0
        return is_plain and device.type == "cpu" and native_library(SOURCE) is not None

    def plan(self, batch: AttentionBatch, members: Sequence[int], window: int | None) -> CPUDecodePlan:
        """Compute what all layers share for these sequences of the batch."""
        lengths = [batch.context_lens[index] for index in members]
        firsts = [0 if window is None else max(0, length - window) for length in lengths]
        tables = [batch.used_blocks(index) for index in members]
        columns = max(map(len, tables))
        longest = max(length - first for first, length in zip(firsts, lengths, strict=True))
        starts = batch.query_starts
        return CPUDecodePlan(
            token_rows=torch.tensor([starts[index] for index in members]),
            blocks=torch.tensor([table + [0] * (columns - len(table)) for table in tables]),
            visible=torch.tensor([firsts, lengths]),
            scores=torch.empty(GROUP, -(-longest // LANES) * LANES),
        )

    def attend(self, layer: int, query: torch.Tensor, plan: CPUDecodePlan) -> torch.Tensor:
        """Attend query (sequences, num_heads, head_dim), which may be a view, over the blocks."""
        query = query.contiguous()
        out = torch.empty_like(query)
        first_tile = self._first_tiles[layer][False]
        num_sequences, num_columns = plan.blocks.shape
        visible = plan.visible.data_ptr()
        self._function(
            *(query.data_ptr(), num_sequences, first_tile, plan.blocks.data_ptr(), num_columns),
            *(visible, visible + num_sequences * plan.visible.itemsize, ctypes.addressof(self._shape)),
            *(plan.scores.data_ptr(), plan.scores.shape[1], out.data_ptr()),
        )
        return out

    def plan_prefill(self, batch: AttentionBatch, index: int, window: int | None) -> CPUPrefillPlan:
        """Compute what all layers share for one sequence of the batch."""
        context, query = batch.context_lens[index], batch.query_lens[index]
        window = context if window is None else window
        num_visible = context - max(0, context - query + 1 - window)
        num_positions = -(-num_visible // PANEL) * PANEL
        head_dim = self._shape.head_dim
        num_floats = num_positions * head_dim + BLOCK_ROWS * (num_positions + LANES + 2 * head_dim)
        return CPUPrefillPlan(
            blocks=torch.tensor(batch.used_blocks(index)),
            num_context_tokens=context,
            window=window,
            scratch=torch.empty(num_floats),
        )

    def attend_prefill(self, layer: int, query: torch.Tensor, plan: CPUPrefillPlan) -> torch.Tensor:
        """Attend query (num_tokens, num_heads, head_dim), which may be a view, over the blocks."""
        if query.stride()[1:] != (query.shape[2], 1):  # only the token stride is free
            query = query.contiguous()
        out = torch.empty(query.shape)
        self._prefill(
            *(query.data_ptr(), query.shape[0], query.stride(0), self._first_tiles[layer][False]),
            *(plan.blocks.data_ptr(), plan.num_context_tokens, plan.window, ctypes.addressof(self._shape)),
            *(plan.scratch.data_ptr(), out.data_ptr()),
        )
        return out

    def write(
        self, layer: int, rows: torch.Tensor, tiles: torch.Tensor, offsets: torch.Tensor, *, is_value: bool
    ) -> None:
        """Store rows (num_tokens, num_kv_heads, head_dim), heads of a token packed.

        Args:
            tiles: (num_tokens,) int64, K tile of each token's first head in layer 0.
            offsets: (num_tokens,) int64, the row inside it.

        Changes: the arena.
        """
        self._write(
            *(rows.data_ptr(), rows.shape[0], rows.stride(0), self._first_tiles[layer][is_value]),
            *(tiles.data_ptr(), offsets.data_ptr(), ctypes.addressof(self._shape)),
        )
